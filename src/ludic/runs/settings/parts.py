"""The parts that a run names: environments, a protocol, an algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from ludic.runs.settings.base import Arguments, PartSection, Section


class EnvSection(PartSection):
    """An environment by its registered name or place (`kind`)."""

    weight: float = Field(default=1.0, gt=0)
    name: str | None = Field(default=None, min_length=1)
    isolation: Literal["process"] | None = None


class ProtocolSection(PartSection):
    """How agents and environment meet: a protocol by name, with its arguments. Among them may be a
    `reward`: functions beside the environment's own, such as a judge."""

    kind: str = "single_agent"


def as_list(value: Any) -> Any:
    """One table is a list of one: `[env]`, or several `[[env]]`."""
    return [value] if isinstance(value, dict) else value


Envs: TypeAlias = Annotated[list[EnvSection], BeforeValidator(as_list)]


class AlgorithmSection(Section):
    """An algorithm by name (`ludic algorithms` lists them), with its arguments. Among them may be
    an `aggregation`: a name, or a table with its `kind` and arguments. So are `corrections` of the
    mismatch between sampler and trainer: `{ kind = "truncated_importance", upper = 2.0 }`,
    `{ kind = "masked_importance", level = "turn" }`."""

    name: str = "grpo"
    kwargs: Arguments = {}
    corrections: list[str | Arguments] = []
