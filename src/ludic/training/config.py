"""The trainer's settings, and the learning rate that they give for each step. Combinations that
cannot work are refused on construction.

A run file's `[training]` takes its defaults from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from ludic.errors import ConfigError
from ludic.plumbing.precision import Precision

AttentionKind: TypeAlias = Literal["auto", "varlen", "sdpa"]
HeadKernels: TypeAlias = Literal["auto", "triton", "compiled", "eager"]
"""What works on a chunk of logits on a GPU: our Triton kernels, torch.compile, or plain torch.
"auto" is Triton where it can compile, else plain torch."""
OptimizerDevice: TypeAlias = Literal["cpu"]
Schedule: TypeAlias = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where and how often the whole state is saved; the newest `keep` are kept.

    With `background` the disk is written while training goes on, and a checkpoint counts only
    once it is complete. Waiting longer than `write_timeout_s` for one is an error, in either case.
    With `resume` a trainer starts from `latest` where there is one. Without `resumable` only the
    model is written, a seventh of the size, which other runs can start from.
    """

    folder: str | Path
    every: int = 50
    keep: int = 2
    background: bool = False
    resume: bool = True
    resumable: bool = True
    write_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if not self.write_timeout_s > 0:
            raise ConfigError(
                f"CheckpointConfig.write_timeout_s={self.write_timeout_s!r}: must be > 0"
            )
        if self.every < 1 or self.keep < 1:
            raise ConfigError(
                f"CheckpointConfig: every={self.every} and keep={self.keep} must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """How to optimise, and how much fits on the device at once.

    `micro_token_budget` bounds the tokens of one forward pass, on which memory depends; None: as
    many as fit and still gain speed (`ludic.memory`). With `gradient_checkpointing` layers are
    computed again in the backward pass; None: if a row of `max_seq_len` does not fit without it.
    The logits of `keep_logits` tokens of a pass are kept for its backward pass, and those of others
    computed again; None: on a single GPU, as many as there is room for.
    `max_seq_len` bounds a single sample. A longer one costs the episode that it was played in; in
    data that was given, it is an error. `epochs` and `mini_batches` give several optimizer steps
    per batch, with proximal log-probs from before the first. `overlap` samples the next batch,
    under the present policy, while this one trains: it is then one version old, which `max_lag`
    must allow: no token of a batch may be more versions old than that, and one that is older is an
    error. None sets no bound.
    `precision` must fit the weights; None: in their type, with torch's switches as they are.
    `compile` has torch.compile work on the decoder layers, which takes a while to begin with;
    `optimizer_device="cpu"` has the optimizer's masters and moments in the host's memory; None: on
    the model's device.
    `head_kernels` says what turns logits into log-probs on a GPU. `fused_layers` computes layers
    of the best-known families in fewer kernels there. `graphs` replays passes as CUDA graphs where
    the model is so small that launching is what they cost.
    """

    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final_lr_ratio: float = 0.0
    optimizer_device: OptimizerDevice | None = None

    max_seq_len: int = 2048
    micro_token_budget: int | None = None
    epochs: int = 1
    mini_batches: int = 1
    overlap: bool = False
    max_lag: int | None = 1

    precision: Precision | None = None
    attention: AttentionKind = "auto"
    gradient_checkpointing: bool | None = None
    keep_logits: int | None = None
    compile: bool = False
    head_kernels: HeadKernels = "auto"
    fused_layers: bool = True
    graphs: bool = True

    max_nonfinite_steps: int = 3
    batch_timeout_s: float = 3600.0
    publish_timeout_s: float = 600.0
    seed: int = 0
    checkpoint: CheckpointConfig | None = None
    run_dir: str | Path | None = None
    eval_every: int | None = None

    def __post_init__(self) -> None:
        finite = (
            (math.isfinite(value), name, "finite")
            for name in (f.name for f in fields(self))
            if isinstance(value := getattr(self, name), float)
            and (name, value) != ("max_grad_norm", math.inf)  # no clipping
        )
        choices = {
            "schedule": get_args(Schedule),
            "attention": get_args(AttentionKind),
            "head_kernels": get_args(HeadKernels),
            "precision": (None, *get_args(Precision)),
            "optimizer_device": (None, *get_args(OptimizerDevice)),
        }
        chosen = (
            (getattr(self, name) in allowed, name, f"one of {allowed}")
            for name, allowed in choices.items()
        )
        rules = (
            *finite,
            (self.learning_rate > 0, "learning_rate", "> 0"),
            (all(0 <= b < 1 for b in self.betas), "betas", "two numbers in [0, 1)"),
            (self.eps >= 0, "eps", ">= 0"),
            (self.weight_decay >= 0, "weight_decay", ">= 0"),
            (self.max_grad_norm is None or self.max_grad_norm > 0, "max_grad_norm", "> 0 or None"),
            *chosen,
            (self.warmup_steps >= 0, "warmup_steps", ">= 0"),
            (0 <= self.final_lr_ratio <= 1, "final_lr_ratio", "in [0, 1]"),
            (self.max_seq_len >= 2, "max_seq_len", ">= 2"),
            (self.keep_logits is None or self.keep_logits >= 0, "keep_logits", ">= 0 or None"),
            (self.epochs >= 1, "epochs", ">= 1"),
            (self.mini_batches >= 1, "mini_batches", ">= 1"),
            (self.max_lag is None or self.max_lag >= 0, "max_lag", ">= 0 or None"),
            (self.max_nonfinite_steps >= 0, "max_nonfinite_steps", ">= 0"),
            (self.batch_timeout_s > 0, "batch_timeout_s", "> 0"),
            (self.publish_timeout_s > 0, "publish_timeout_s", "> 0"),
            (self.eval_every is None or self.eval_every >= 1, "eval_every", ">= 1 or None"),
        )
        for ok, name, must in rules:
            if not ok:
                raise ConfigError(f"TrainerConfig.{name}={getattr(self, name)!r}: must be {must}")
        if self.micro_token_budget is not None and self.micro_token_budget < self.max_seq_len:
            raise ConfigError(
                f"micro_token_budget={self.micro_token_budget} is below max_seq_len="
                f"{self.max_seq_len}: a sample of that length would not fit any micro-batch; raise "
                "the first or lower the second"
            )
        if self.overlap and self.max_lag == 0:
            raise ConfigError(
                "overlap=True trains on samples that are one version old, and max_lag=0 allows "
                "none: set max_lag to at least 1, or overlap to False"
            )
        if self.schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"schedule={self.schedule!r} needs total_steps, where it ends")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"total_steps={self.total_steps} leaves nothing after warmup_steps="
                f"{self.warmup_steps}"
            )

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps that one batch gives."""
        return self.epochs * self.mini_batches


def learning_rate(cfg: TrainerConfig, step: int) -> float:
    """The rate of step `step`, counted from 0: a linear warm-up, then the schedule.

    `linear` and `cosine` fall to `final_lr_ratio` of the peak at `total_steps` and stay there.
    """
    if step < cfg.warmup_steps:
        return cfg.learning_rate * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant" or cfg.total_steps is None:
        return cfg.learning_rate
    done = min((step - cfg.warmup_steps) / (cfg.total_steps - cfg.warmup_steps), 1.0)
    left = 1.0 - done if cfg.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return cfg.learning_rate * (cfg.final_lr_ratio + (1.0 - cfg.final_lr_ratio) * left)


def curve(cfg: TrainerConfig) -> dict[str, Any]:
    """The settings that decide the rate, as JSON: saved, to tell whether a resumed run keeps it."""
    settings = ["schedule", "learning_rate", "warmup_steps"]
    if cfg.schedule != "constant":
        settings += ["total_steps", "final_lr_ratio"]
    return {name: getattr(cfg, name) for name in settings}


def describe_change(cfg: TrainerConfig, saved: Mapping[str, Any], step: int) -> str | None:
    """What `cfg` changes in the curve that a run was saved with; None for nothing, or where
    nothing was saved."""
    now = curve(cfg)
    if not saved or now == saved:
        return None
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    changes = ", ".join(f"{name}={now.get(name)} (was {saved.get(name)})" for name in names)
    rate = learning_rate(cfg, step)
    return (
        f"the learning rate follows another curve from step {step} on: {changes}; it is {rate:.3g}"
    )
