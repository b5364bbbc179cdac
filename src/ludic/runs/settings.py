"""A run is one TOML file plus overrides, checked before anything starts.

`load_run("run.toml", ["training.learning_rate=1e-5"])` returns a `RunConfig`, or raises a
`ConfigError` that names the key, the nearest right one, and the line.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ludic.errors import ConfigError
from ludic.precision import Precision
from ludic.rollouts import LostMemberPolicy

SCHEMA = 1
MICRO_TOKEN_BUDGET = 16384


class Section(BaseModel):
    """A table of the run file. Unknown keys are errors, and so are NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _without_nan(value: Any) -> Any:
    """Raises if there is a NaN among a part's arguments, which most checks would let through."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, float) and math.isnan(item):
            raise ValueError(f"{key} is not a number (nan)")
        if isinstance(item, (dict, list)):
            _without_nan(item)
    return value


Arguments: TypeAlias = Annotated[dict[str, Any], AfterValidator(_without_nan)]


class RunSection(Section):
    """Which run this is, and where it is kept. The same `seed` and `threads` on a CPU give the
    same run, to the bit; without `threads`, torch takes as many as there are cores."""

    name: str = "run"
    seed: int = 0
    folder: str = "runs"
    threads: int | None = Field(default=None, ge=1)


class LoraSection(Section):
    """Train an adapter of this rank instead of all weights (needs the extra `peft`)."""

    rank: int = Field(default=16, ge=1)
    alpha: float = 32.0
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class ModelSection(Section):
    """`tiny` is the embedded model; anything else is a folder or a name on the hub. `precision` is
    what trainer and engine compute in (see `ludic.precision`); left out, it is float32 on a CPU.
    `dtype` is the older word for it, and names the type of the weights only."""

    name: str = "tiny"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    precision: Precision | None = None
    device: str | None = None
    kwargs: Arguments = {}
    lora: LoraSection | None = None
    tool_parser: str | None = None

    @field_validator("precision")
    @classmethod
    def _fits_dtype(cls, value: Precision | None, others: ValidationInfo) -> Precision | None:
        dtype = others.data.get("dtype")
        if value and dtype and (value == "bfloat16") != (dtype == "bfloat16"):
            raise ValueError(f"contradicts dtype = {dtype!r}: leave dtype out")
        return value


class SamplingSection(Section):
    """As in `SamplingConfig`; the defaults may be trained on."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int | None = Field(default=64, ge=1)
    stop: list[str] = []


class InferenceSection(Section):
    """Where tokens come from: the in-process engine, or vLLM. Without addresses in `servers`, a
    vLLM server is started for the run, by the Python in `vllm_python` (default: this one). With
    `publish_lora = "adapter"`, vLLM gets the LoRA adapter alone after each update, and not all
    weights with the adapter merged into them."""

    backend: Literal["local", "vllm"] = "local"
    servers: list[str] = []
    vllm_python: str | None = None
    publish_lora: Literal["merged", "adapter"] = "merged"
    slots: int = Field(default=64, ge=1)
    max_context_tokens: int | None = Field(default=None, ge=8)
    deterministic: bool | None = None
    sampling: SamplingSection = SamplingSection()

    @field_validator("publish_lora")
    @classmethod
    def _goes_to_vllm(cls, value: str, others: ValidationInfo) -> str:
        if value == "adapter" and others.data.get("backend") != "vllm":
            raise ValueError('needs backend = "vllm"; the in-process engine shares the adapter')
        return value


class PartSection(Section):
    """A registered part by name, with its arguments."""

    kind: str
    kwargs: Arguments = {}


class EnvSection(PartSection):
    """An environment by name. `weight` is its share when a run mixes several."""

    weight: float = Field(default=1.0, gt=0)


class ProtocolSection(PartSection):
    """How agents and environment meet: a protocol by name, with its arguments."""

    kind: str = "single_agent"


def _as_list(value: Any) -> Any:
    """`[env]` is a list of one; `[[env]]` tables are a mix."""
    return [value] if isinstance(value, dict) else value


class AlgorithmSection(Section):
    """An algorithm by name (`ludic algorithms` lists them), with its arguments. Among them may be
    an `aggregation`: a name, or a table with its `kind` and arguments."""

    name: str = "grpo"
    kwargs: Arguments = {}


class TrainingSection(Section):
    """The optimisation, and how much is rolled out for each step of it, and how. `max_steps`,
    `concurrency` and the deadlines hold for all episodes of the run, those of its evaluation and
    its teacher too. `lost_member` is what becomes of a group when one of its episodes fails. With
    `past_opponents`, a seat of a game of several is taken, in `past_share` of the episodes, by one
    of that many earlier policies, the last of those at every `checkpoint_every` steps."""

    steps: int = Field(default=100, ge=0)
    rollouts_per_update: int = Field(default=64, ge=1)
    max_steps: int = Field(default=16, ge=1)
    concurrency: int = Field(default=64, ge=1)
    step_timeout_s: float = Field(default=60.0, gt=0)
    episode_timeout_s: float = Field(default=600.0, gt=0)
    lost_member: LostMemberPolicy = "drop_group"
    learning_rate: float = Field(default=1e-5, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)  # inf: no clipping
    micro_token_budget: int = Field(default=MICRO_TOKEN_BUDGET, ge=1)
    max_seq_len: int = Field(default=2048, ge=2)
    mini_batches: int = Field(default=1, ge=1)
    epochs: int = Field(default=1, ge=1)
    overlap: bool = False
    gradient_checkpointing: bool = False
    compile: bool = False
    head_kernels: Literal["auto", "triton", "compiled", "eager"] = "auto"
    checkpoint_every: int = Field(default=50, ge=0)
    keep_checkpoints: int = Field(default=2, ge=1)
    past_opponents: int = Field(default=0, ge=0)
    past_share: float = Field(default=0.5, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _room_for_the_longest(cls, data: Any) -> Any:
        """A budget that is left out holds the longest sample; one that is set is taken as it is."""
        longest = data.get("max_seq_len") if isinstance(data, dict) else None
        if isinstance(longest, int) and longest > MICRO_TOKEN_BUDGET:
            return {"micro_token_budget": longest, **data}
        return data


class SFTSection(Section):
    """Supervised steps before the reinforcement: on the rows of a file (`data`), or on episodes
    that a scripted teacher plays (`teacher = "module:function"`, a function of the observation
    and a `random.Random`). `aggregation` is as among an algorithm's arguments."""

    data: str | None = None
    teacher: str | None = None
    examples: int = Field(default=1000, ge=1)
    steps: int = Field(default=100, ge=0)
    batch_size: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    aggregation: str | Arguments = "token_mean"

    @model_validator(mode="after")
    def _one_source(self) -> SFTSection:
        if (self.data is None) == (self.teacher is None):
            raise ValueError("give either a file as `data` or a function as `teacher`")
        return self


class EvalSection(Section):
    """Held-out episodes; `every = 0` evaluates only at the stages' ends. `env` and `protocol` are
    those of the training unless given: a player that learns from itself is measured against
    others. `outcomes` are the endings to report, as the environment calls them, the one that
    counts first."""

    env: Annotated[list[EnvSection], BeforeValidator(_as_list)] = []
    protocol: ProtocolSection | None = None
    outcomes: list[str] = []
    episodes: int = Field(default=400, ge=1)
    every: int = Field(default=0, ge=0)
    seed: int = 1_000_003
    samples_per_task: int = Field(default=1, ge=1)
    temperature: float | None = Field(default=None, ge=0)


class LoggingSection(Section):
    """Where metrics go besides `metrics.jsonl`, which is always written."""

    loggers: list[Literal["live", "console", "wandb", "tensorboard"]] = ["live"]
    keep_rollouts: bool = True


class RunConfig(Section):
    """The whole run, resolved."""

    schema_version: int = Field(default=SCHEMA, alias="schema")
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    inference: InferenceSection = InferenceSection()
    env: Annotated[list[EnvSection], BeforeValidator(_as_list), Field(min_length=1)]
    protocol: ProtocolSection = ProtocolSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    training: TrainingSection = TrainingSection()
    sft: SFTSection | None = None
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()

    def plain(self) -> dict[str, Any]:
        """Returns the run as JSON, from which `check_run` makes the same run."""
        return self.model_dump(by_alias=True, mode="json")


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a run file, with `section.key=value` overrides applied."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot read the run file {path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not a text file in UTF-8") from exc
    return parse_run(text, overrides, source=str(path))


def parse_run(text: str, overrides: Sequence[str] = (), source: str = "run file") -> RunConfig:
    """As `load_run`, from the text itself."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{source} is not valid TOML: {exc}") from exc
    overridden = [apply_override(data, override) for override in overrides]
    return check_run(data, text, source, overridden)


def check_run(
    data: Mapping[str, Any],
    text: str = "",
    source: str = "run file",
    overridden: Sequence[str] = (),
) -> RunConfig:
    """Validates a run's tables; errors name the line of `text` where there is one."""
    version = data.get("schema", SCHEMA)
    if isinstance(version, int) and version > SCHEMA:
        raise ConfigError(
            f"{source} has schema {version}; this version of Ludic reads up to {SCHEMA}: "
            "upgrade with `pip install -U ludic-rl`"
        )
    try:
        return RunConfig.model_validate(data)
    except ValidationError as exc:
        problems = [_explain(error, text, overridden) for error in exc.errors()]
        raise ConfigError(f"{source}: " + "; ".join(dict.fromkeys(problems))) from exc


def override_key(override: str) -> str:
    """Returns the `a.b` of `a.b=value`."""
    key, equals, _ = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", key.strip()):
        raise ConfigError(
            f"override {override!r} is not of the form section.key=value, "
            "for example training.learning_rate=1e-5"
        )
    return key.strip()


def apply_override(data: dict[str, Any], override: str) -> str:
    """Puts `a.b=value` into `data` and returns `a.b`; the value is TOML, or else a string."""
    key, raw = override_key(override), override.partition("=")[2].strip()
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    *tables, last = key.split(".")
    table: Any = data
    for name in tables:
        table = table.setdefault(name, {})
        if isinstance(table, list) and len(table) == 1:
            table = table[0]  # a mix of one environment, as a resolved run has it
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {name!r} is not a table")
    table[last] = value
    return key


def _explain(error: Any, text: str, overridden: Sequence[str]) -> str:
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = _known_keys(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        problem = f"unknown key {key!r}: {hint}"
    elif error["type"] == "missing":
        problem = f"{key!r} is missing"
        if key == "env":
            problem += ': name an environment, as in [env] kind = "tic_tac_toe"'
    else:
        problem = f"{key!r} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
    if key in overridden:
        return f"{problem} (from the command line)"
    line = _line_of(path, text)
    return f"{problem} (line {line})" if line else problem


def _known_keys(path: Sequence[str]) -> list[str]:
    model: Any = RunConfig
    for part in path:
        if part.isdigit():
            continue
        field = model.model_fields.get(part)
        annotation = field.annotation if field else None
        options = getattr(annotation, "__args__", None) or [annotation]
        model = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)
        if model is None:
            return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _line_of(path: Sequence[str], text: str) -> int | None:
    """Returns the line that sets `path`, or the header of the deepest table on the way to it."""
    wanted = [part for part in path if not part.isdigit()]
    table: list[str] = []
    best: tuple[int, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if header := re.match(r"\[{1,2}\s*([^\]]+?)\s*\]{1,2}", stripped):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            here = table
        elif assignment := re.match(r"([A-Za-z0-9_.\"'-]+)\s*=", stripped):
            here = table + [part.strip("\"'") for part in assignment[1].split(".")]
        else:
            continue
        if here == wanted[: len(here)] and (best is None or len(here) > best[0]):
            best = (len(here), number)
    return best[1] if best else None
