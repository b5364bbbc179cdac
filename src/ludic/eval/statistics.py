"""Estimates with intervals, pass@k, and a paired test. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, its confidence interval, and the number of observations behind it."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def proportion(successes: float, n: int, confidence: float = 0.95) -> Estimate:
    """Returns a rate with its Wilson score interval, which stays inside [0, 1] also at 0 and n.

    An observation may be a share itself, such as the mean over an episode's agents. Shares vary
    no more than zeros and ones do, so the interval is then wide enough. Without observations the
    interval is [0, 1] and the value NaN.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} trials")
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Estimate(p, low, high, n)


def mean(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Returns the mean with a percentile-bootstrap interval; `seed` fixes the resampling."""
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        return Estimate(math.nan, -math.inf, math.inf, 0)
    rng = np.random.default_rng(seed)
    tail = (1 - confidence) / 2
    means = np.concatenate(
        [x[rng.integers(0, x.size, (500, x.size))].mean(axis=1) for _ in range(RESAMPLES // 500)]
    )
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(float(x.mean()), float(low), float(high), int(x.size))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Returns the chance that one or more of k samples is right, drawn without replacement from n
    of which `correct` are right: 1 − C(n−c, k) / C(n, k)."""
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= correct <= n; n={n}, {correct=}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """B minus A on the same tasks: the mean difference, and the chance of one as large in either
    direction if A and B were exchangeable task by task."""

    difference: Estimate
    p_value: float


def compare_paired(a: Sequence[float], b: Sequence[float], seed: int = 0) -> PairedComparison:
    """Runs a sign-flip permutation test on the differences: exactly up to 16 pairs that differ, and
    with 10,000 random flips beyond."""
    if len(a) != len(b):
        raise ValueError(
            f"a paired test needs the same number of values on each side: {len(a)}, {len(b)}"
        )
    difference = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    changed = difference[difference != 0]
    observed = abs(changed.sum())
    if changed.size == 0:
        p_value = 1.0
    elif changed.size <= 16:
        codes = np.arange(2**changed.size)[:, None] >> np.arange(changed.size) & 1
        sums = np.abs((1 - 2 * codes) @ changed)
        p_value = float(np.mean(sums >= observed * (1 - 1e-12)))
    else:
        rng = np.random.default_rng(seed)
        flips = rng.integers(0, 2, (RESAMPLES, changed.size), dtype=np.int8) * 2 - 1
        extreme = int(np.sum(np.abs(flips @ changed) >= observed * (1 - 1e-12)))
        p_value = (extreme + 1) / (RESAMPLES + 1)
    return PairedComparison(mean(difference.tolist(), seed=seed), p_value)
