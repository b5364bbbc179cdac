"""Statistics of a step: gathered on the device, reduced over ranks, read back once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ludic.saw.items import UNKNOWN_VERSION, SAWBatch
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
