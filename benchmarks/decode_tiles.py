"""How the decode step's products are best cut: each with the norm beside it, tile by tile.

`python -m benchmarks.decode --tiles` calls it. A product and a norm, over weights that no cache
holds, are replayed as a graph. The winners go into `MEASURED` of the kernels' `products` by hand.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from ludic.inference.local.gpu.kernels import gated, project, rms_norm, split_product
from ludic.inference.local.gpu.kernels.products import (
    MEASURED,
    Tiles,
    gated_tiles,
    project_tiles,
    split_tiles,
)

GATED = (
    Tiles(128, 64, 64, 4, 3),
    Tiles(128, 64, 64, 8, 3),
    Tiles(128, 64, 64, 8, 5, more=16),
    Tiles(128, 128, 64, 8, 4),
    Tiles(128, 128, 64, 8, 4, more=16),
)
SPLIT = (
    Tiles(128, 64, 128, 4, 4, parts=5),
    Tiles(128, 128, 64, 8, 6, parts=4),
    Tiles(128, 128, 64, 8, 3, parts=8),
    Tiles(128, 128, 64, 8, 6, parts=10),
    Tiles(128, 256, 64, 8, 4, parts=9),
)
PROJECT = (Tiles(128, 32, 64, 4, 5), Tiles(64, 64, 64, 4, 6), Tiles(128, 128, 64, 8, 4))

_CACHED_BYTES = 200 << 20


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 30


def _microseconds(calls: list[Callable[[], object]]) -> float:
    """Of one of the calls, which a graph makes one after the other: the median of five."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(6):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 100 / len(calls))
    return statistics.median(times[1:])


class _Trial:
    """A product of so many rows, by its name in `MEASURED`."""

    def __init__(self, name: str, rows: int, inner: int, counts: list[int]) -> None:
        self.name, self.rows, self.inner, self.counts = name, rows, inner, counts
        width = counts[0] if name != "project" else sum(counts)
        self.key = (name, rows, inner, width)
        size = sum(counts) * inner * 2
        copies = max(2, -(-_CACHED_BYTES // size))
        self.weights = [tuple(_random(n, inner) for n in counts) for _ in range(copies)]
        self.biases = tuple(_random(n) for n in counts)
        self.x = _random(rows, width if name == "split" else inner)
        self.y = _random(rows, inner)
        self.scales = _random(self.x.shape[1])

    def call(self, weights: tuple[Tensor, ...]) -> None:
        if self.name == "split":
            rms_norm(self.x, self.scales, 1e-6, split_product(self.y, weights[0]))
            return
        x = rms_norm(self.x, self.scales, 1e-6)
        if self.name == "gated":
            gated(x, weights[0], weights[1])
        else:
            project(x, (weights[0], weights[1], weights[2]), self.biases)

    def vendors(self, weights: tuple[Tensor, ...]) -> None:
        self.x.addmm_(self.y, weights[0].t())
        rms_norm(self.x, self.scales, 1e-6)

    def time(self, tiles: Tiles | None) -> float:
        """With these tiles; None stands for the vendor's kernel."""
        if tiles is not None:
            MEASURED[self.key] = tiles
        call = self.vendors if tiles is None else self.call
        try:
            return _microseconds([lambda w=w: call(w) for w in self.weights])  # type: ignore[misc]
        finally:
            MEASURED.pop(self.key, None)


def try_tiles(
    rows: int, width: int, inner: int, heads: int, kv_heads: int, dim: int
) -> tuple[dict[tuple[str, int, int, int], Tiles], set[tuple[str, int, int, int]]]:
    """The best tiles of a layer's products, and those with which ours is not slower than the
    vendor's. Prints each time."""
    projections = [heads * dim, kv_heads * dim, kv_heads * dim]
    trials: list[tuple[_Trial, Tiles, tuple[Tiles, ...]]] = []

    def add(
        name: str, size: int, counts: list[int], today: Tiles, others: tuple[Tiles, ...]
    ) -> None:
        fits = [t for t in others if name == "gated" or all(n % t.columns == 0 for n in counts)]
        trials.append((_Trial(name, rows, size, counts), today, tuple(fits)))

    add("gated", width, [inner, inner], gated_tiles(rows, width, inner), GATED)
    add("split", inner, [width], split_tiles(rows, inner, width), SPLIT)
    add("split", heads * dim, [width], split_tiles(rows, heads * dim, width), SPLIT)
    add("project", width, projections, project_tiles(rows, width, projections), PROJECT)
    best: dict[tuple[str, int, int, int], Tiles] = {}
    pays: set[tuple[str, int, int, int]] = set()
    for trial, today, others in trials:
        times: dict[Tiles, float] = {}
        floor = trial.inner * sum(trial.counts) * 2 / 4.3e6
        print(f"{trial.key}: weights once {floor:.1f} µs", flush=True)
        for tiles in dict.fromkeys((today, *others)):
            try:
                times[tiles] = trial.time(tiles)
            except Exception as exc:  # a tile that does not fit this device is no candidate
                print(f"  {tuple(tiles)}: {type(exc).__name__}: {str(exc)[:80]}", flush=True)
                continue
            print(f"  {tuple(tiles)}: {times[tiles]:.1f} µs", flush=True)
        best[trial.key] = min(times, key=lambda t: times[t])
        if trial.name == "split":
            vendors = trial.time(None)
            print(f"  vendor's: {vendors:.1f} µs", flush=True)
            if vendors < min(times.values()):
                continue
        pays.add(trial.key)
    return best, pays
