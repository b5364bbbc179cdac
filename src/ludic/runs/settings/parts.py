"""The parts that a run names: environments, a protocol, an algorithm."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

from ludic.runs.settings.base import Arguments, PartSection, Section


class EnvSection(PartSection):
    """An environment by name. `weight` is its share when a run mixes several."""

    weight: float = Field(default=1.0, gt=0)


class ProtocolSection(PartSection):
    """How agents and environment meet: a protocol by name, with its arguments."""

    kind: str = "single_agent"


def _as_list(value: Any) -> Any:
    """`[env]` is a list of one; `[[env]]` tables are a mix."""
    return [value] if isinstance(value, dict) else value


Envs: TypeAlias = Annotated[list[EnvSection], BeforeValidator(_as_list)]


class AlgorithmSection(Section):
    """An algorithm by name (`ludic algorithms` lists them), with its arguments. Among them may be
    an `aggregation`: a name, or a table with its `kind` and arguments."""

    name: str = "grpo"
    kwargs: Arguments = {}
