"""Statistics of a step: gathered on the device, reduced over ranks, read back once. Also where the
time went, and MFU."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ludic.distributed.interfaces import PublishReport
from ludic.plumbing.model_parts import base_causal_lm, config_facts, head_of
from ludic.saw.items import UNKNOWN_VERSION, SAWBatch
from ludic.sharding.world import World
from ludic.training.types import LossBatch, Stat, TokenLogProbs

PREFIXES = ("train/", "eval/", "perf/")


def named(name: str) -> str:
    """`name` under one of the canonical prefixes; `train/` where it has none."""
    return name if name.startswith(PREFIXES) else f"train/{name}"


class StatBuffer:
    """Adds up the stats of micro-batches. Nothing is read from the device before `reduce`.

    Means are weighted by what their weights count (tokens, mostly), over micro-batches and ranks
    alike. Every rank must have seen the same names.
    """

    def __init__(self) -> None:
        self._stats: dict[str, Stat] = {}

    def add(self, stats: Mapping[str, Stat], *, counted: bool = True) -> None:
        """Adds one micro-batch's. One that is not counted only makes its names known."""
        for name, stat in stats.items():
            key, new = named(name), _detached(stat, counted)
            old = self._stats.get(key)
            self._stats[key] = new if old is None else _joined(old, new)

    def reduce(
        self, group: dist.ProcessGroup | None = None, grad_norm: Tensor | None = None
    ) -> dict[str, float]:
        """The values, the same on every rank of `group`; one transfer from the device.

        `grad_norm` is the same everywhere already and only travels along.
        """
        if grad_norm is not None:
            self.add({"train/grad_norm": Stat(grad_norm, torch.ones_like(grad_norm), "max")})
        if not self._stats:
            return {}
        names = sorted(self._stats)
        stats = [self._stats[n] for n in names]
        sums = torch.stack([*(s.total for s in stats), *(s.weight for s in stats)])
        peaks = torch.stack([-s.total if s.how == "min" else s.total for s in stats])
        if group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
            dist.all_reduce(peaks, dist.ReduceOp.MAX, group=group)
        values = torch.cat([sums, peaks]).tolist()
        count, result = len(names), {}
        for i, (name, stat) in enumerate(zip(names, stats, strict=True)):
            total, weight, peak = values[i], values[count + i], values[2 * count + i]
            if stat.how == "mean":
                if weight:
                    result[name] = total / weight
            elif stat.how == "sum":
                result[name] = total
            elif peak != -torch.inf:  # else there was nothing to compare
                result[name] = -peak if stat.how == "min" else peak
        self._stats = {}
        return result


def over_steps(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One line for several optimizer steps: extremes stay extremes, all else is averaged."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        values = [line[name] for line in lines if name in line]
        how = {"max": max, "min": min}.get(name.rpartition("_")[2], mean)
        joined[name] = float(how(values))
    return joined


def _detached(stat: Stat, counted: bool) -> Stat:
    total, weight = (t.detach().reshape(()).double() for t in (stat.total, stat.weight))
    if not counted:
        nothing = {"max": -torch.inf, "min": torch.inf}.get(stat.how, 0.0)
        total, weight = torch.full_like(total, nothing), torch.zeros_like(weight)
    return Stat(total, weight.to(total.device), stat.how)


def _joined(a: Stat, b: Stat) -> Stat:
    if a.how == "max":
        return Stat(torch.maximum(a.total, b.total), a.weight, a.how)
    if a.how == "min":
        return Stat(torch.minimum(a.total, b.total), a.weight, a.how)
    return Stat(a.total + b.total, a.weight + b.weight, a.how)


def policy_stats(policy: TokenLogProbs, batch: LossBatch, version: int) -> dict[str, Stat]:
    """What every algorithm is told: entropy, staleness, how far the log-probs recomputed at the
    start of an update are from those that the sampler reported, before clipping, and how far the
    policy is from a reference, where there is one."""
    stats: dict[str, Stat] = {}
    if policy.entropy is not None:
        stats["entropy"] = Stat.mean(policy.entropy)
    if batch.versions is not None:
        recorded = batch.versions != UNKNOWN_VERSION
        age = (version - batch.versions).clamp(min=0).float()  # newer ones are of a lost attempt
        stats["staleness_mean"] = Stat((age * recorded).sum(), recorded.sum())
        stats["staleness_max"] = Stat.max(age.where(recorded, -torch.inf))
    if batch.behavior_logprobs is not None:
        # Where an update has several steps, only the proximal log-probs are from its start.
        ours = batch.proximal_logprobs
        gap = (policy.logprobs.detach() if ours is None else ours) - batch.behavior_logprobs
        stats["mismatch_abs"] = Stat.mean(gap.abs())
        stats["mismatch_max"] = Stat.max(gap.abs())
        stats["mismatch_kl"] = Stat.mean(-gap)
        stats["mismatch_ratio"] = Stat.mean(gap.exp())
    if batch.reference_logprobs is not None:
        stats["kl_reference"] = Stat.mean(policy.logprobs.detach() - batch.reference_logprobs)
    return stats


def batch_metrics(batch: SAWBatch) -> dict[str, float]:
    """The numbers among the batch's `meta`, and how much is trained on."""
    numbers = {k: v for k, v in batch.meta.items() if isinstance(v, (int, float))}
    counts = batch.counts
    return {
        **{k if "/" in k else f"train/{k}": float(v) for k, v in numbers.items()},
        "train/samples": float(len(batch.items)),
        "train/action_tokens": float(counts.tokens),
        "train/turns": float(counts.turns),
        "train/rollouts": float(counts.rollouts),
    }


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations per second, from the makers' data sheets."""


class Clock:
    """Laps of a stopwatch: each adds the time since the one before to its name."""

    def __init__(self) -> None:
        self.start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def elapsed(self) -> float:
        return self._last - self.start


class ModelFlops:
    """Counts a training step's useful operations; recomputation is not useful.

    A token costs 6 operations per backbone parameter, an action token 6 per parameter of the
    head, and attention 6 · layers · width · length² per sequence (causal: half of the square).
    Frozen weights (LoRA) get no gradient and cost 4 instead of 6.
    """

    def __init__(self, model: nn.Module) -> None:
        causal = base_causal_lm(model)
        head = head_of(causal)
        embedding = causal.get_input_embeddings()  # type: ignore[operator]
        skip = {id(p) for m in (head, embedding) for p in m.parameters()}
        own = [p for p in causal.parameters() if id(p) not in skip]
        self.backbone = sum(p.numel() * (6 if p.requires_grad else 4) for p in own)
        self.head = sum(p.numel() * (6 if p.requires_grad else 4) for p in head.parameters())
        facts = config_facts(causal)
        heads, head_dim = (facts.get(k) or 0 for k in ("num_attention_heads", "head_dim"))
        width = heads * head_dim or facts.get("hidden_size") or 0
        self.attention = 6 * (facts.get("num_hidden_layers") or 0) * width

    def of(self, tokens: int, pairs: int, actions: int) -> float:
        """Operations of forward and backward over so many tokens; `pairs` is the sum of the
        sequences' squared lengths, less the squares of what they share."""
        return self.backbone * tokens + self.attention * pairs + self.head * actions


class PerfMeter:
    """Turns a step's laps into `perf/` metrics."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.flops, self.world = ModelFlops(model), world
        self.peak = peak_flops(world.device)
        self._started: float | None = None

    def clock(self) -> Clock:
        clock = Clock()
        self._started = clock.start if self._started is None else self._started
        return clock

    def metrics(
        self, batch: SAWBatch, clock: Clock, work: Workload, *, passes: int = 1
    ) -> Mapping[str, float]:
        """Tokens per second, share of the device's arithmetic, memory, and the laps themselves.

        `work` is what was computed for all optimizer steps: tokens that rows share count once in
        it, and in the arithmetic, while the batch's tokens are those of its rows.
        """
        tokens = sum([np.count_nonzero(item.attention_mask) for item in batch.items])
        computing = clock.laps.get("perf/forward_backward_s", 0.0)
        computing = max(computing + clock.laps.get("perf/optimizer_s", 0.0), 1e-9)
        result = {
            **clock.laps,
            "perf/step_s": clock.elapsed,
            "perf/elapsed_s": time.perf_counter() - (self._started or clock.start),
            "perf/tokens_per_s": passes * tokens / computing,
            "perf/tokens": float(tokens),
            "perf/tokens_computed": work.tokens / passes,
        }
        if self.peak:
            actions = passes * batch.counts.tokens
            operations = self.flops.of(work.tokens, work.pairs, actions)
            result["perf/mfu"] = operations / computing / (self.peak * self.world.size)
        if self.world.device.type == "cuda":
            result["perf/gpu_mem_alloc_mb"] = torch.cuda.memory_allocated(self.world.device) / 2**20
            result["perf/gpu_mem_peak_mb"] = (
                torch.cuda.max_memory_allocated(self.world.device) / 2**20
            )
            torch.cuda.reset_peak_memory_stats(self.world.device)
        return result


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bfloat16 operations per second, where they are known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


@dataclass(frozen=True, slots=True)
class Workload:
    """What computing rows together takes: `size` in the budget's tokens, `cost` in time; the tokens
    that are computed, and the pairs of tokens that meet in attention, twice."""

    size: int = 0
    cost: float = 0.0
    tokens: int = 0
    pairs: int = 0

    def __add__(self, other: Workload) -> Workload:
        return Workload(
            self.size + other.size,
            self.cost + other.cost,
            self.tokens + other.tokens,
            self.pairs + other.pairs,
        )


_log = logging.getLogger("ludic.training")
_FIGURES = {
    "stall_s": "perf/publish_stall_s",
    "canary_max": "perf/publish_canary_max",
    "background_s": "perf/publish_background_s",
    "behind": "perf/publish_behind",
}


class PublishLog:
    """Warns of every server that goes out of rotation, and says when it is back."""

    def __init__(self) -> None:
        self._lost: dict[str, str] = {}

    def take(self, report: PublishReport | None) -> dict[str, float]:
        """The report's figures under their metrics' names; a publisher may have none to give."""
        if report is None:
            return {}
        details = report.details
        lost = {str(url): str(why) for url, why in dict(details.get("lost", {})).items()}
        for url in lost.keys() - self._lost.keys():
            _log.warning(
                "version %d is without %s, which is out of rotation: %s. The next publish tries it "
                "again",
                report.version,
                url,
                lost[url],
            )
        for url in (self._lost.keys() - lost.keys()) & set(details.get("servers", self._lost)):
            _log.warning("version %d: %s is back in rotation", report.version, url)
        self._lost = lost
        figures = {name: float(details[key]) for key, name in _FIGURES.items() if key in details}
        return figures | ({"perf/servers_lost": float(len(lost))} if "lost" in details else {})
