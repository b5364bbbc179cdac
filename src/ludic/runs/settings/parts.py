"""What a run is made of: environments, a protocol, an algorithm, models, a curriculum, and what
samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ludic.distributed.vllm.placement import PlaneName
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
        if said := [name for name in sorted(unfit) if getattr(self, name)]:
            this, other = ("model", "server") if self.server is None else ("server", "model")
            raise ValueError(f"{said[0]} belongs to a `{other}`, and this is a `{this}`")
        return self


class ReferenceSection(OtherModelSection):
    """The model to stay near. `model = "start"` is the policy as the reinforcement begins with it;
    anything else is as in `[model]`, or a vLLM `server` (`served_name`: what it calls the model;
    left out, its first one). The KL is in the loss by `kl_coeff` among the algorithm's arguments,
    or in the reward by `kl_in_reward`, its coefficient; `horizon` says how far ahead a token is
    charged for the KL."""

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
    """Another model that plays in the run's episodes and is not trained: a seat of the protocol
    takes it by its `name`, `client = "…"`. A `server` is vLLM (`api = "vllm"`), or any other with
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
            f"teachers {rest[0] + 1} and {rest[1] + 1} both say neither `envs` nor `tasks`: say "
            f"which is for what, as in envs = [{envs[0]!r}]"
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


class SamplingSection(Section):
    """As in `SamplingConfig`; the defaults can be trained on. A completion ends with a text in
    `stop` or a token in `stop_token_ids`, or as the model ends it."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int | None = Field(default=64, ge=1)
    stop: list[str] = []
    stop_token_ids: list[NonNegativeInt] = []


OWN_FLAGS = {
    "model": "model.name",
    "served-model-name": "nothing: the run names it",
    "host": "inference.servers, for a server that you start yourself",
    "port": "inference.servers, for a server that you start yourself",
    "dtype": "model.precision",
    "max-model-len": "inference.max_context_tokens",
    "max-num-seqs": "inference.slots",
    "gpu-memory-utilization": "inference.vllm.gpu_memory",
    "enforce-eager": "inference.vllm.eager",
    "logprobs-mode": "nothing: training needs processed_logprobs",
    "weight-transfer-config": "nothing: updates go through it",
    "worker-extension-cls": "nothing: updates go through it",
    "enable-lora": 'inference.publish_lora = "adapter"',
    "max-lora-rank": "model.lora.rank",
    "hf-token": "the environment variable HF_TOKEN",
    "api-key": "nothing: a server that is started for the run listens on loopback alone",
}
"""Flags of vLLM that a run sets itself, and by which of its keys."""


class VLLMSection(Section):
    """For a vLLM server that is started for the run. `gpu_memory` is its share of the GPU's memory
    (left out, it is computed such that a trainer on the same GPU has room, and is vLLM's own
    default on another), `eager` leaves CUDA graphs out, `kv_cache_gib` is the CPU build's cache,
    and after `start_timeout_s` a server that is not healthy yet is given up. `flags` are any others
    of vLLM by name, `{ max-num-batched-tokens = 8192, enable-prefix-caching = false }`."""

    gpu_memory: float | None = Field(default=None, gt=0, le=1)
    eager: bool | None = None
    kv_cache_gib: int = Field(default=1, ge=1)
    start_timeout_s: float = Field(default=600.0, gt=0)
    flags: dict[str, bool | int | float | str | Arguments] = {}

    @field_validator("flags")
    @classmethod
    def _not_the_runs_own(cls, flags: dict[str, Any]) -> dict[str, Any]:
        for name in flags:
            plain = flag_name(name)
            own = plain if plain in OWN_FLAGS else plain.removeprefix("no-")
            if own in OWN_FLAGS:
                raise ValueError(f"{name} is set by the run: use {OWN_FLAGS[own]}")
        return flags

    def flag(self, name: str) -> Any:
        """Returns the value of one of `flags` by vLLM's spelling; None if it is not there."""
        return {flag_name(given): value for given, value in self.flags.items()}.get(name)

    def arguments(self) -> tuple[str, ...]:
        """Returns the `flags` as vLLM's command takes them."""
        found: list[str] = []
        for name, value in self.flags.items():
            plain = flag_name(name)
            if isinstance(value, bool):
                found.append(f"--{plain}" if value else f"--no-{plain}")
            else:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                found += [f"--{plain}", text]
        return tuple(found)


def flag_name(name: str) -> str:
    """Returns a flag as vLLM spells it: `max_num_seqs` and `--max-num-seqs` are `max-num-seqs`."""
    return name.lstrip("-").replace("_", "-")


PUBLISHING = ("publish_plane", "publish_address", "publish_port")


class InferenceSection(KeyedSection):
    """Where tokens come from: the in-process engine, or vLLM. Without addresses in `servers`, a
    vLLM server is started for the run, by the Python in `vllm_python` (default: this one). With
    `servers = "registered"` they are those that say in Redis that they serve this run (`ludic serve
    --register`): they may come and go while it runs. With
    `publish_lora = "adapter"`, vLLM gets the LoRA adapter alone after each update, and not all
    weights with the adapter merged into them. `publish_plane` is the way that the weights take;
    left out, it follows from where the servers are. A broadcast (`"nccl"` between GPUs, `"gloo"`)
    meets at `publish_address` and `publish_port` of this machine, which the servers must reach;
    left out, any address and port that will do. If the servers want a key, it is in the environment
    variable `api_key_env` or in the file `api_key_file`; a run file holds no secret, and an address
    neither user nor password."""

    backend: Literal["local", "vllm"] = "local"
    servers: list[Address] | Literal["registered"] = []
    vllm_python: str | None = None
    publish_lora: Literal["merged", "adapter"] = "merged"
    publish_plane: PlaneName = "auto"
    publish_address: str | None = None
    publish_port: int | None = Field(default=None, ge=1, le=65535)
    slots: int | None = Field(default=None, ge=1)
    max_context_tokens: int | None = Field(default=None, ge=8)
    deterministic: bool | None = None
    sampling: SamplingSection = SamplingSection()
    vllm: VLLMSection = VLLMSection()

    @model_validator(mode="after")
    def _for_vllm(self) -> InferenceSection:
        started = self.backend == "vllm" and self.servers in ([], "registered")
        if self.vllm != VLLMSection() and not started:
            raise ValueError(
                "[inference.vllm] is for a server that is started for the run: set backend = "
                '"vllm" and name no servers'
            )
        said = [key for key in PUBLISHING if getattr(self, key) not in (None, "auto")]
        if said and self.backend != "vllm":
            raise ValueError(
                f'{said[0]} is for backend = "vllm"; the in-process engine shares the weights'
            )
        if said and self.publish_lora == "adapter":
            raise ValueError(
                f'{said[0]} is for whole weights, and publish_lora = "adapter" sends a '
                "folder: leave one of them out"
            )
        if self.publish_plane in ("shared_memory", "ipc") and said[1:]:
            raise ValueError(
                f'{said[1]} belongs to a broadcast: set publish_plane = "nccl" or '
                '"gloo", or leave it out'
            )
        if not self.servers and (self.api_key_env or self.api_key_file):
            raise ValueError("api_key_env and api_key_file are for servers: name them in `servers`")
        return self

    @field_validator("publish_lora")
    @classmethod
    def _goes_to_vllm(cls, value: str, others: ValidationInfo) -> str:
        if value == "adapter" and others.data.get("backend") != "vllm":
            raise ValueError('needs backend = "vllm"; the in-process engine shares the adapter')
        return value
