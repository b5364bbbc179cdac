"""A decode step of the in-process engine at the sizes that users have, with and without LoRA.

    python -m benchmarks.decode              # shapes of 0.5B, 1.5B and 7B, rank 16 beside each
    python -m benchmarks.decode --shapes 1.5b --rows 128 --rank 32
    python -m benchmarks.decode --shapes 1.5b --rows 128 --profile --tiles
    python -m benchmarks.decode --shapes 1.5b --rows 8 --context 16384 --rank 0 --parts 1
    python -m benchmarks.decode --shapes 1.5b --rows 128 --rank 0 --common 160

Random weights in the shape of Qwen2.5, bfloat16. Every row has `--context` tokens; the step is
replayed as a graph, sampling and log-probs included, and nobody reads what it samples. With LoRA
it is measured twice: products wait for the adapters' first ones, or begin beside them. `--profile`
prints the step's kernels. `--tiles` tries other tiles for its products, and measures the step with
the best, too. `--parts` measures it with other numbers of programs that share a row, beside the
engine's own. With `--common`, groups of eight rows have so many first tokens in common, which are
read once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.random_models import SHAPES, random_model
from ludic.inference.local import LocalChatClient
from ludic.inference.tiny import tiny_tokenizer

NEEDS = ("gpu",)


GROUP = 8


def step_ms(client: LocalChatClient, rows: int, context: int, common: int = 0) -> float:
    """Milliseconds of a step of so many rows: the median of five times twenty."""
    batch = client._scheduler.batch  # type: ignore[attr-defined]
    rows, bucket = batch.sizes(rows, context)
    batch.state.zero_()
    batch.positions[:rows] = context - 1
    if common:
        batch.share_rows([(row // GROUP * GROUP, common) for row in range(rows)])
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    times: list[float] = []
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(4):
            batch.step(rows, bucket)
        for _ in range(5):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(20):
                batch.step(rows, bucket)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 20)
    batch.positions.zero_()
    return statistics.median(times)


def print_kernels(client: LocalChatClient, rows: int, context: int) -> None:
    """The kernels of a step by the time they take: microseconds, launches, name. Kernels that are
    launched early count the time that they wait."""
    batch = client._scheduler.batch  # type: ignore[attr-defined]
    rows, bucket = batch.sizes(rows, context)
    steps = 5
    with torch.inference_mode(), torch.profiler.profile() as profile:
        for _ in range(steps):
            batch.step(rows, bucket)
        torch.cuda.synchronize()
    kernels = [k for k in profile.key_averages() if k.device_type.name == "CUDA"]
    for kernel in sorted(kernels, key=lambda k: -k.self_device_time_total)[:24]:
        us, launches = kernel.self_device_time_total / steps, kernel.count / steps
        print(f"  {us:9.1f} µs {launches:6.1f} launches  {kernel.key[:90]}", flush=True)


@contextmanager
def variant(name: str, tiles: dict[Any, Any]) -> Iterator[None]:
    """The kernels with other tiles, or with products that begin after their adapters' first."""
    from ludic.inference.local.gpu.kernels import adapters, products

    before, beside = dict(products.MEASURED), adapters.BESIDE
    products.MEASURED.update(tiles)
    adapters.BESIDE = {"waiting": False, "": beside}.get(name, True)
    try:
        yield
    finally:
        adapters.BESIDE = beside
        products.MEASURED.clear()
        products.MEASURED.update(before)


async def measure(
    shape: str,
    rank: int,
    rows: list[int],
    context: int,
    *,
    profile: bool,
    tiles: dict[Any, Any],
    parts: list[int],
    longest: int,
    common: int,
) -> dict[tuple[str, int], float]:
    """Milliseconds by variant and number of rows."""
    model = random_model(shape, rank)
    slots, length = max(rows), longest or -(-(context + 64) // 64) * 64
    names = ["waiting", "beside"] if rank else [""]
    if tiles:
        names.append("tiles")
    by_parts = {f"{n}_parts": n for n in parts}
    names += by_parts
    times: dict[tuple[str, int], float] = {}
    async with LocalChatClient(
        model, tiny_tokenizer(), max_slots=slots, max_context_tokens=length
    ) as client:
        batch = client._scheduler.batch  # type: ignore[attr-defined]
        graphs, chosen = batch.graphs, batch.parts
        for name in names:
            given = by_parts.get(name)
            batch.parts = dict.fromkeys(chosen, given) if given else chosen
            with variant(name, tiles if name == "tiles" else {}):
                for count in rows:
                    times[name, count] = step_ms(client, count, context, common)
                    shared = batch.parts[batch.sizes(count, context)[0]]
                    what = f"{shape} rank {rank} {name} {count} rows, {shared} programs each"
                    print(f"{what}: {times[name, count]:.3f} ms", flush=True)
                    if profile:
                        print_kernels(client, count, context)
            graphs._graphs.clear()
            graphs._met.clear()
            graphs._pool = torch.cuda.graph_pool_handle()
    return times


def best_tiles(shape: str, rows: list[int]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Those of the step without adapters, and with them."""
    from benchmarks.decode_tiles import try_tiles

    width, inner, _, heads, kv_heads, _ = SHAPES[shape]
    plain: dict[Any, Any] = {}
    adapted: dict[Any, Any] = {}
    with torch.inference_mode():
        for count in rows:
            best, pays = try_tiles(count, width, inner, heads, kv_heads, width // heads)
            adapted |= best
            plain |= {key: tiles for key, tiles in best.items() if key in pays}
    return plain, adapted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64, 128, 256])
    parser.add_argument("--context", type=int, default=320)
    parser.add_argument("--longest", type=int, default=0, help="of a slot; 0: the context, and 64")
    parser.add_argument("--rank", type=int, default=16, help="of LoRA; 0: without it alone")
    parser.add_argument("--parts", nargs="*", type=int, default=[], help="programs of a row")
    parser.add_argument("--common", type=int, default=0, help="tokens that eight rows share")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each step")
    parser.add_argument("--tiles", action="store_true", help="try other tiles first")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    for shape in args.shapes:
        tiles = best_tiles(shape, args.rows) if args.tiles else ({}, {})
        for rank in dict.fromkeys((0, args.rank)):
            look: dict[str, Any] = {"profile": args.profile, "tiles": tiles[rank > 0]}
            look |= {"parts": args.parts, "longest": args.longest, "common": args.common}
            times = asyncio.run(measure(shape, rank, args.rows, args.context, **look))
            for (name, rows), ms in times.items():
                parts = [shape, *([f"lora{rank}"] if rank else []), f"{rows}_rows", name, "ms"]
                figures["_".join(part for part in parts if part)] = round(ms, 3)
            gc.collect()
            torch.cuda.empty_cache()
    print(json.dumps(figures | {"context": args.context, "gpu": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main()
