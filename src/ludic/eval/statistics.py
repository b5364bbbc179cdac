"""Estimates with intervals, pass@k, and a paired test. NumPy only.

What is observed independently is a task; the samples of one task are alike. `mean` is told which
values belong to which task, and counts a task once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ludic.errors import DataError

RESAMPLES = 10_000
_LARGEST = 1e150
"""The square of a value must be a number, too."""
Bounds = tuple[float, float]


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
    """Returns the rate of independent successes with its Wilson score interval, which stays inside
    [0, 1] also at 0 and n. Without observations the interval is [0, 1] and the value NaN."""
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} trials")
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, 0)
    low, high = _score_interval(successes / n, n, _normal_quantile(confidence), 1.0, (0.0, 1.0))
    return Estimate(successes / n, low, high, n)


def mean(
    values: Sequence[float],
    confidence: float = 0.95,
    *,
    tasks: Sequence[Hashable] | None = None,
    bounds: Bounds | None = None,
) -> Estimate:
    """Returns the mean with an interval that counts the values of one task, named in `tasks`, as
    one observation.

    The interval comes from how far the tasks lie apart. It is a score interval, as Wilson's is,
    between `bounds`: those given, else [0, 1] or [-1, 1] if they hold all values, as they do most
    rewards. Other values get a t-interval that is corrected for their skewness. One task alone, or
    none named twice, is the same as no tasks.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        return Estimate(math.nan, *(bounds or (-math.inf, math.inf)), 0)
    if not (np.abs(x) <= _LARGEST).all():
        worst = float(x[np.argmax(np.where(np.isnan(x), np.inf, np.abs(x)))])
        raise DataError(
            f"a value of {worst:g} cannot be averaged: values must be finite, and below "
            f"{_LARGEST:g}; scale the rewards down"
        )
    value = float(x.mean())
    seen = _by_task(x, tasks)
    bounds = bounds or _natural_bounds(x)
    if bounds is None:
        return Estimate(value, *_skewed_interval(seen, confidence), int(x.size))
    if set(seen.tolist()) <= set(bounds):  # successes and failures
        spread, width = 1.0, _normal_quantile(confidence)
    else:
        largest = (value - bounds[0]) * (bounds[1] - value)
        if seen.size == 1:
            return Estimate(value, *bounds, int(x.size))
        spread = float(seen.var(ddof=1)) / largest if largest > 0 else 1.0
        width = t_quantile(0.5 + confidence / 2, seen.size - 1)
    return Estimate(value, *_score_interval(value, seen.size, width, spread, bounds), int(x.size))


def _by_task(x: NDArray[np.float64], tasks: Sequence[Hashable] | None) -> NDArray[np.float64]:
    """One value per task, with the mean of all values: a task's mean where all have as many."""
    if tasks is None or not 1 < len(set(tasks)) < x.size:
        return x
    places: dict[Hashable, int] = {}
    at = np.array([places.setdefault(task, len(places)) for task in tasks])
    centre = x.mean()
    sums = np.bincount(at, x - centre)
    return np.asarray(centre + sums * (len(places) / x.size))


def _natural_bounds(x: NDArray[np.float64]) -> Bounds | None:
    if x.max() > 1 or x.min() < -1:
        return None
    return (0.0, 1.0) if x.min() >= 0 else (-1.0, 1.0)


def _score_interval(
    value: float, n: int, width: float, spread: float, bounds: Bounds
) -> tuple[float, float]:
    """The means μ that lie within `width` standard errors of `value`, where the variance at μ is
    `spread` times the largest there is, (μ - low)(high - μ)."""
    low, high = bounds
    c = spread * width * width / n
    centre = (value + c * (low + high) / 2) / (1 + c)
    rest = (value * value + c * low * high) / (1 + c)
    half = math.sqrt(max(centre * centre - rest, 0.0))
    below = low if value == low else max(low, min(centre - half, value))
    above = high if value == high else min(high, max(centre + half, value))
    return below, above


def _skewed_interval(x: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """Hall's interval: t quantiles, bent by the skewness that the values show."""
    if x.size < 2:
        return -math.inf, math.inf
    value, n = float(x.mean()), x.size
    if (deviation := float(x.std(ddof=1))) == 0:
        return value, value
    third = float((((x - value) / deviation) ** 3).mean())
    skewness = third * n * n / ((n - 1) * (n - 2)) if n > 2 else 0.0
    width = t_quantile(0.5 + confidence / 2, n - 1)
    low, high = (value - _bent(t, skewness, n) * deviation / math.sqrt(n) for t in (width, -width))
    return min(low, value), max(high, value)


def _bent(t: float, skewness: float, n: int) -> float:
    """The quantile of a t statistic of skewed values, by the inverse of Hall's cubic."""
    if abs(skewness) < 1e-9:
        return t
    slope = skewness / 3
    root = math.cbrt(1 + 3 * slope * (t / math.sqrt(n) - skewness / (6 * n)))
    return (root - 1) / slope * math.sqrt(n)


def _normal_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def t_quantile(p: float, df: int) -> float:
    """The quantile of Student's t with a whole number of degrees of freedom, for p above 1/2."""
    if df > 1000:
        z = NormalDist().inv_cdf(p)
        return z + (z**3 + z) / (4 * df)
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # of the angle: its tangent times √df is t
        angle = (low + high) / 2
        low, high = (angle, high) if 0.5 + _t_mass(angle, df) / 2 < p else (low, angle)
    return math.tan((low + high) / 2) * math.sqrt(df)


def _t_mass(angle: float, df: int) -> float:
    """P(|T| <= √df tan angle), as the finite sum for a whole number of degrees of freedom."""
    cosine, odd = math.cos(angle), df % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd + 1, df, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


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


def compare_paired(
    a: Sequence[float],
    b: Sequence[float],
    seed: int = 0,
    *,
    tasks: Sequence[Hashable] | None = None,
) -> PairedComparison:
    """Runs a sign-flip permutation test on the differences, task by task: exactly up to 16 tasks
    that differ, and with 10,000 random flips beyond.

    The chance is the mid-p value: a difference as large as the one seen counts half. Rewards are
    often whole numbers, of which a few give few differences, and the test would reject far more
    rarely than it says.
    """
    if len(a) != len(b):
        raise ValueError(
            f"a paired test needs the same number of values on each side: {len(a)}, {len(b)}"
        )
    difference = np.asarray(b, dtype=np.float64) - np.asarray(a, dtype=np.float64)
    bounded = bool((np.abs(difference) <= 1).all())
    estimate = mean(difference.tolist(), tasks=tasks, bounds=(-1.0, 1.0) if bounded else None)
    seen = _by_task(difference, tasks)
    changed = seen[np.abs(seen) > 1e-12 * np.abs(seen).max(initial=0)]
    if changed.size == 0:
        return PairedComparison(estimate, 1.0)
    if changed.size <= 16:
        codes = np.arange(2**changed.size)[:, None] >> np.arange(changed.size) & 1
        sums = np.abs((1 - 2 * codes) @ changed)
    else:
        rng = np.random.default_rng(seed)
        flips = rng.integers(0, 2, (RESAMPLES, changed.size), dtype=np.int8) * 2 - 1
        sums = np.append(np.abs(flips @ changed), abs(changed.sum()))
    observed = abs(changed.sum())
    slack = 1e-12 * np.abs(changed).sum()
    larger, as_large = np.mean(sums > observed + slack), np.mean(sums >= observed - slack)
    return PairedComparison(estimate, float(larger + as_large) / 2)
