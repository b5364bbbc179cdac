"""The stages of a run, and the whole run."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ludic.pipeline.ledger import Bounds
from ludic.pipeline.reading import StalePolicy
from ludic.rollouts import LostMemberPolicy, RolloutEngine
from ludic.runs.settings.base import Arguments, Section
from ludic.runs.settings.inference import InferenceSection
from ludic.runs.settings.parts import (
    AlgorithmSection,
    CurriculumSection,
    Envs,
    ModelSection,
    Players,
    ProtocolSection,
    ReferenceSection,
    Teachers,
)
from ludic.training.batching.replay_buffer import ReplayBufferSource
from ludic.training.config import (
    AttentionKind,
    CheckpointConfig,
    HeadKernels,
    OptimizerDevice,
    Schedule,
    TrainerConfig,
)


def _defaults(cls: type) -> dict[str, Any]:
    """What a class does by default, and so a run."""
    return {name: a.default for name, a in inspect.signature(cls).parameters.items()}


TRAINER, CHECKPOINTS = _defaults(TrainerConfig), _defaults(CheckpointConfig)
ENGINE, REPLAY = _defaults(RolloutEngine), _defaults(ReplayBufferSource)


class ReplayBufferSection(Section):
    """Also train on groups of earlier updates, next to the `rollouts_per_update` new episodes:
    they are `share` of the batch's groups, and at most `max_age` policy versions old. They
    are drawn uniformly, or with a `half_life` with probabilities that halve for every so many
    versions of age."""

    share: float = Field(default=REPLAY["share"], gt=0, lt=1)
    max_age: int = Field(default=REPLAY["max_age"], ge=1)
    half_life: float | None = Field(default=REPLAY["half_life"], gt=0)


class TrainingSection(Section):
    """The optimisation, and the episodes that each step trains on. `max_steps`,
    `concurrency` and the deadlines hold for all episodes of the run, those of its evaluation and
    its teacher too. With `workers`, the episodes that are trained on are played in so many further
    processes, for environments that compute much and runs that Python holds up; what is sampled
    stays the same. `lost_member` says what happens to a group if one of its episodes fails.
    `filters` leave turns out of the training: a name (`"drop_truncated"`), a table with its `kind`
    and arguments (`{ kind = "drop_overlong", max_seq_len = 512 }`), or a function of a sample
    (`"module:function"`). With `dynamic_sampling`, groups without variance in their rewards are
    dropped and others sampled in their place, in at most that many rounds in all. `max_lag` is how
    many updates old a sample may be: of interest with `overlap` (one) or `[pipeline]`. With
    `past_opponents`, a seat of a game of several is taken, in `past_share` of the episodes, by one
    of that many earlier policies, the last of those at every `checkpoint_every` steps. On several
    ranks (`torchrun -m ludic train …`) none waits longer than `rank_timeout_s` for the others; it
    must be more than rank 0 takes for a batch or an evaluation."""

    steps: int = Field(default=100, ge=0)
    rollouts_per_update: int = Field(default=64, ge=1)
    max_steps: int = Field(default=16, ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    workers: int = Field(default=0, ge=0)
    step_timeout_s: float = Field(default=ENGINE["step_timeout_s"], gt=0)
    episode_timeout_s: float = Field(default=ENGINE["episode_timeout_s"], gt=0)
    lost_member: LostMemberPolicy = ENGINE["lost_member"]
    learning_rate: float = Field(default=TRAINER["learning_rate"], gt=0)
    betas: tuple[float, float] = TRAINER["betas"]
    eps: float = Field(default=TRAINER["eps"], ge=0)
    warmup_steps: int = Field(default=TRAINER["warmup_steps"], ge=0)
    schedule: Schedule = TRAINER["schedule"]
    final_lr_ratio: float = Field(default=TRAINER["final_lr_ratio"], ge=0, le=1)
    weight_decay: float = Field(default=TRAINER["weight_decay"], ge=0)
    # inf: no clipping
    max_grad_norm: float = Field(default=TRAINER["max_grad_norm"], gt=0, allow_inf_nan=True)
    optimizer_device: OptimizerDevice | None = TRAINER["optimizer_device"]
    micro_token_budget: int | None = Field(default=TRAINER["micro_token_budget"], ge=1)
    max_seq_len: int = Field(default=TRAINER["max_seq_len"], ge=2)
    mini_batches: int = Field(default=TRAINER["mini_batches"], ge=1)
    epochs: int = Field(default=TRAINER["epochs"], ge=1)
    overlap: bool = TRAINER["overlap"]
    max_lag: int = Field(default=TRAINER["max_lag"], ge=0)
    attention: AttentionKind = TRAINER["attention"]
    gradient_checkpointing: bool | None = TRAINER["gradient_checkpointing"]
    keep_logits: int | None = Field(default=TRAINER["keep_logits"], ge=0)
    compile: bool = TRAINER["compile"]
    head_kernels: HeadKernels = TRAINER["head_kernels"]
    fused_layers: bool = TRAINER["fused_layers"]
    graphs: bool = TRAINER["graphs"]
    max_nonfinite_steps: int = Field(default=TRAINER["max_nonfinite_steps"], ge=0)
    batch_timeout_s: float = Field(default=TRAINER["batch_timeout_s"], gt=0)
    publish_timeout_s: float = Field(default=TRAINER["publish_timeout_s"], gt=0)
    rank_timeout_s: float = Field(default=7200.0, gt=0)
    checkpoint_every: int = Field(default=CHECKPOINTS["every"], ge=0)
    keep_checkpoints: int = Field(default=CHECKPOINTS["keep"], ge=1)
    resumable: bool = CHECKPOINTS["resumable"]
    filters: list[str | Arguments] = []
    dynamic_sampling: int = Field(default=0, ge=0)
    replay_buffer: ReplayBufferSection | None = None
    past_opponents: int = Field(default=0, ge=0)
    past_share: float = Field(default=0.5, ge=0, le=1)


class SFTSection(Section):
    """Supervised steps before RL: on the rows of a file (`data`), or on episodes
    that a scripted teacher plays (`teacher = "module:function"`, a function of the observation,
    a `random.Random` and optionally the `history`). `aggregation` is as among an algorithm's
    arguments."""

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
    """Held-out episodes; `every = 0` evaluates only when a stage ends. `env` and `protocol` are
    those of the training unless given: a player that learns from itself is measured against
    others. `outcomes` are the endings to report, as the environment calls them, the one that
    counts first: its rate is the headline. For an environment without endings of its own, an
    episode succeeds by a reward above `success_above`; without that, the mean reward leads."""

    env: Envs = []
    protocol: ProtocolSection | None = None
    outcomes: list[str] = []
    success_above: float | None = None
    episodes: Annotated[int, Field(ge=1)] | Literal["all"] = 400
    every: int = Field(default=0, ge=0)
    seed: int = 1_000_003
    samples_per_task: int = Field(default=1, ge=1)
    temperature: float | None = Field(default=None, ge=0)


def _redis(address: str) -> str:
    if not address.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("the URL of a Redis begins with redis://, rediss:// or unix://")
    return address


class PipelineSection(Section):
    """RL in several processes: actors that sample, and a trainer, joined by Redis. `ludic train RUN
    --async` is this table with its defaults, where the file has none. Without a `url`, a Redis is
    started for the run; a URL with a password is in the environment variable `url_env`. `name` is
    that of the run's keys; left out, it is that of its folder. `actors` are started with the
    trainer; more may join from anywhere with `ludic actor`. With `stale = "wait"`, actors wait so
    that no sample is older than `training.max_lag` updates; with `"drop"` and `"correct"` they run
    ahead, and what is older is dropped and its prompt put back, or trained on with the loss's
    corrections. When new weights come to an actor that samples in-process, its completions under
    way `"continue"` under them, each token with its version, or `"finish"` first (`on_update`).
    Batches have groups in the order of their requests (`in_order`), or as they arrive. At most
    `max_groups` groups and about `max_bytes` are between actors and trainer. After `lease_s`
    without a word, an actor's work is given to another. `policy_folder` is where actors that sample
    in-process find the weights, if they share it. Actors on other machines fetch them by HTTP from
    the trainer and from each other: each listens on `policy_address`, an address of its machine
    with or without a port, or `auto` for the one by which it reaches Redis."""

    actors: int = Field(default=2, ge=0)
    url: Annotated[str, AfterValidator(_redis)] | None = None
    url_env: str | None = None
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._+-]+$", max_length=200)
    stale: StalePolicy = "wait"
    on_update: Literal["continue", "finish"] = "continue"
    in_order: bool = True
    max_groups: int | None = Field(default=None, ge=1)
    max_bytes: int = Field(default=Bounds().bytes, ge=1)
    lease_s: float = Field(default=15.0, gt=0)
    patience_s: float = Field(default=300.0, gt=0)
    policy_folder: str | None = None
    policy_address: str = "127.0.0.1"

    @model_validator(mode="after")
    def _one_address(self) -> PipelineSection:
        if self.url is not None and self.url_env is not None:
            raise ValueError("give url or url_env, not both")
        return self


class ClusterSection(Section):
    """Which processes `ludic launch` starts for a run over Redis, and where: on the nodes of a Ray
    cluster, or with `engine = "local"` on this host. The trainer has `ranks_per_node` ranks on each
    of `trainer_nodes` nodes, with a GPU each unless `model.device` is the CPU. `servers` register
    with the run, have `gpus_per_server` each, and serve with vLLM or, for small models, with
    Ludic's own engine (`server_engine = "local"`). Between `actors_min` and `actors_max` actors
    run, as the trainer needs them; without `actors_max`, always `actors_min`. A role that ends is
    started again up to `restarts` times, with a growing pause; ten minutes without an end count as
    a new beginning. A trainer without a place waits for one for `patience_s`. Commands run with
    `python` in `folder`, both as on this host unless given, and with this host's values of the
    environment variables that `variables` names."""

    engine: Literal["ray", "local"] = "ray"
    trainer_nodes: int = Field(default=1, ge=1)
    ranks_per_node: int = Field(default=1, ge=1)
    servers: int = Field(default=0, ge=0)
    server_engine: Literal["vllm", "local"] = "vllm"
    gpus_per_server: float = Field(default=1.0, ge=0)
    actors_min: int = Field(default=2, ge=1)
    actors_max: int | None = Field(default=None, ge=1)
    cpus_per_actor: float = Field(default=1.0, gt=0)
    restarts: int = Field(default=3, ge=0)
    patience_s: float = Field(default=600.0, gt=0)
    folder: str | None = None
    python: str | None = None
    variables: list[str] = []

    @model_validator(mode="after")
    def _in_order(self) -> ClusterSection:
        if self.actors_max is not None and self.actors_max < self.actors_min:
            raise ValueError(f"actors_max={self.actors_max} is below actors_min={self.actors_min}")
        return self


SCHEMA = 1


class RunSection(Section):
    """The run's name, seed and place. The same `seed` and `threads` on a CPU give the
    same run, to the bit; without `threads`, torch takes as many as there are cores. `imports` are
    modules to import first: what they register can then be named."""

    name: str = "run"
    seed: int = 0
    folder: str = "runs"
    threads: int | None = Field(default=None, ge=1)
    imports: list[str] = []


class LoggingSection(Section):
    """Where metrics go besides `metrics.jsonl`, which is always written. A logger is a name
    (`"live"`, `"console"`, `"wandb"`, `"tensorboard"`, `"trackio"`, or one that was registered),
    its place (`"module:Class"`), or a table with its `kind` and arguments:
    `{ kind = "wandb", project = "mine" }`."""

    loggers: list[str | Arguments] = ["live"]
    keep_rollouts: bool = True
    keep_tokens: bool = True


class RunConfig(Section):
    """The whole run, resolved."""

    schema_version: int = Field(default=SCHEMA, alias="schema")
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    inference: InferenceSection = InferenceSection()
    env: Annotated[Envs, Field(min_length=1)]
    protocol: ProtocolSection = ProtocolSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    reference: ReferenceSection | None = None
    teacher: Teachers = []
    player: Players = []
    curriculum: CurriculumSection = CurriculumSection()
    training: TrainingSection = TrainingSection()
    pipeline: PipelineSection | None = None
    cluster: ClusterSection | None = None
    sft: SFTSection | None = None
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()

    @property
    def concurrency(self) -> int:
        """How many episodes run at once: all of an update's, so that none waits for another."""
        most = min(max(64, self.training.rollouts_per_update), 256)
        return self.training.concurrency or most

    @property
    def slots(self) -> int:
        """How many completions are sampled at once: one for each episode."""
        return self.inference.slots or self.concurrency

    def plain(self) -> dict[str, Any]:
        """Returns the run as JSON, from which `check_run` makes the same run."""
        return self.model_dump(by_alias=True, mode="json")
