"""What a run is made of: environments, a protocol, an algorithm, models, a curriculum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from ludic.errors import ConfigError, UnknownNameError
from ludic.plumbing.precision import Precision
from ludic.runs.settings.base import Address, Arguments, KeyedSection, PartSection, Section


class EnvSection(PartSection):
    """An environment by its registered name, or as `module:Class` (`kind`)."""

    weight: float = Field(default=1.0, gt=0)
    name: str | None = Field(default=None, min_length=1)
    isolation: Literal["process"] | None = None


class ProtocolSection(PartSection):
    """The loop between agents and environment: a protocol by name, with its arguments.
    Among them may be a `reward`: functions besides the environment's own, such as a judge."""

    kind: str = "single_agent"


def as_list(value: Any) -> Any:
    """One table is a list of one: `[env]`, or several `[[env]]`."""
    return [value] if isinstance(value, dict) else value


Envs: TypeAlias = Annotated[list[EnvSection], BeforeValidator(as_list)]


class AlgorithmSection(Section):
    """An algorithm by name (`ludic algorithms` lists them), with its arguments. Among them may be
    an `aggregation`: a name, or a table with its `kind` and arguments. So are `corrections` of the
    mismatch between sampler and trainer: `{ kind = "truncated_importance", upper = 2.0 }`,
    `{ kind = "masked_importance", level = "turn" }`. `summaries` says what the summaries of the
    context `compacting` get of group-relative credit."""

    name: str = "grpo"
    kwargs: Arguments = {}
    summaries: Literal["advantage", "none"] = "advantage"
    corrections: list[str | Arguments] = []


class LoraSection(Section):
    """Train an adapter of this rank instead of all weights (needs the extra `peft`)."""

    rank: int = Field(default=16, ge=1)
    alpha: float = 32.0
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class ModelSection(Section):
    """`tiny` is the embedded model; anything else is a folder, a name on the hub, or an earlier run
    by its folder: `runs/first`, or one of its models, `runs/first:sft` or `runs/first:step-40`.
    `precision` is what trainer and engine compute in; left out, it is
    float32 on a CPU. `dtype` is the older word for it, and names the type of the weights only.
    `chat_template` is a file with a Jinja template to use in place of the tokenizer's: many a
    model's own cannot show tools."""

    name: str = "tiny"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    precision: Precision | None = None
    device: str | None = None
    kwargs: Arguments = {}
    lora: LoraSection | None = None
    tool_parser: str | None = None
    chat_template: str | None = None

    @field_validator("precision")
    @classmethod
    def _fits_dtype(cls, value: Precision | None, others: ValidationInfo) -> Precision | None:
        dtype = others.data.get("dtype")
        if value and dtype and (value == "bfloat16") != (dtype == "bfloat16"):
            raise ValueError(f"contradicts dtype = {dtype!r}: leave dtype out")
        return value


class OtherModelSection(KeyedSection):
    """A model by name, as in `[model]`, or behind the address of a server."""

    model: str | None = None
    server: Address | None = None
    served_name: str | None = None
    revision: str | None = None
    device: str | None = None
    kwargs: Arguments = {}

    @model_validator(mode="after")
    def _one_source(self) -> OtherModelSection:
        if (self.model is None) == (self.server is None):
            raise ValueError("give either a `model` (as model.name) or the address of a `server`")
        of_server = {"served_name", "api_key_env", "api_key_file"}
        unfit = {"revision", "device", "kwargs"} if self.server is not None else of_server
        if misplaced := [name for name in sorted(unfit) if getattr(self, name)]:
            this, other = ("model", "server") if self.server is None else ("server", "model")
            raise ValueError(f"{misplaced[0]} belongs to a `{other}`, and this is a `{this}`")
        return self


class ReferenceSection(OtherModelSection):
    """The model that a KL term keeps the policy near. `model = "start"` is the policy at the start
    of RL; anything else is as in `[model]`, or a vLLM `server` (`served_name`: what it calls the
    model; left out, its first one). The KL is in the loss by `kl_coeff` among the algorithm's
    arguments, or in the reward by `kl_in_reward`, its coefficient; `horizon` says how far ahead a
    token is charged for the KL."""

    kl_in_reward: float = Field(default=0.0, ge=0)
    horizon: Literal["token", "turn", "rollout"] = "rollout"


class TeacherSection(OtherModelSection):
    """A teacher for the algorithm `opd`: a model as in `[model]`, or a vLLM `server`. With several
    `[[teacher]]` tables, each says for which `envs` (names of the run's environments) or `tasks`
    (their task keys; `*` stands for anything) it is; one that says neither is for the rest."""

    envs: list[str] = []
    tasks: list[str] = []


Teachers: TypeAlias = Annotated[list[TeacherSection], BeforeValidator(as_list)]


class PlayerSection(OtherModelSection):
    """Another model that plays in the run's episodes and is not trained; a seat of the protocol
    names it: `client = "…"`. A `server` is vLLM (`api = "vllm"`), or any other with
    OpenAI's completions, which is sent text; its `tokenizer` is named as a model is, or the run's.
    `temperature` and `max_tokens` are those of the run unless given."""

    name: str = Field(min_length=1)
    api: Literal["vllm", "openai"] = "vllm"
    tokenizer: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _known_to_its_server(self) -> PlayerSection:
        if self.api == "openai" and self.served_name is None:
            raise ValueError('api = "openai" needs a `server` and its `served_name` of the model')
        if self.tokenizer is not None and self.server is None:
            raise ValueError("tokenizer belongs to a `server`; a `model` has its own")
        return self


Players: TypeAlias = Annotated[list[PlayerSection], BeforeValidator(as_list)]


class StageSection(Section):
    """One stage of a curriculum: the run's environments that it mixes, by name. It is over after
    `episodes`, or once `solve_rate` of the last `window` episodes reached a reward of `threshold`,
    whichever comes first; the last stage needs neither."""

    envs: list[str] = Field(min_length=1)
    episodes: int | None = Field(default=None, ge=1)
    solve_rate: float | None = Field(default=None, gt=0, le=1)
    window: int = Field(default=64, ge=1)
    threshold: float = 1.0


class CurriculumSection(Section):
    """Which of the run's environments to play next. `mix`: all, in proportion to their weights.
    `stages`: one `[[curriculum.stage]]` after another. `target_solve_rate`: those that are neither
    hopeless nor done, `width` around a rate of `target`; `learning_rate` is how fast the estimate
    follows, `floor` lets none be forgotten. `uncertain`: those whose outcome is least certain, by
    the values that the algorithm `spo` tracks. With `tasks_per_env`, each environment is that many
    tasks with a fixed seed each, and not one."""

    kind: Literal["mix", "stages", "target_solve_rate", "uncertain"] = "mix"
    stage: Annotated[list[StageSection], BeforeValidator(as_list)] = []
    tasks_per_env: int | None = Field(default=None, ge=1)
    target: float = Field(default=0.5, gt=0, lt=1)
    width: float = Field(default=0.2, gt=0)
    floor: float = Field(default=0.05, ge=0)
    learning_rate: float = Field(default=0.1, gt=0, le=1)
    threshold: float = 1.0


def teachers_by_env(teachers: Teachers, envs: Sequence[str]) -> Mapping[str, str]:
    """Returns the teacher of each environment, by name; empty if there is only one for all. Raises
    if one has none, or two."""
    for number, teacher in enumerate(teachers, 1):
        for env in teacher.envs:
            if env not in envs:
                raise UnknownNameError(f"environment of teacher {number},", env, envs)
    if len(teachers) < 2:
        return {}
    rest = [i for i, t in enumerate(teachers) if not t.envs and not t.tasks]
    if len(rest) > 1:
        raise ConfigError(
            f"teachers {rest[0] + 1} and {rest[1] + 1} both have neither `envs` nor `tasks`: "
            f"say which is for what, as in envs = [{envs[0]!r}]"
        )
    by_env: dict[str, str] = {}
    for env in envs:
        own = [i for i, t in enumerate(teachers) if env in t.envs]
        if len(own) > 1:
            raise ConfigError(
                f"teachers {own[0] + 1} and {own[1] + 1} are both for environment {env!r}"
            )
        if own or rest:
            by_env[env] = teacher_name((own or rest)[0])
        elif not any(t.tasks for t in teachers):
            raise ConfigError(f"no teacher is for environment {env!r}: name it in one's `envs`")
    return by_env


def teacher_name(index: int) -> str:
    """What the rollouts of a run call its teachers."""
    return f"teacher-{index + 1}"
