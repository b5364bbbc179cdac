"""The memory of an update: predicted by `ludic.memory`, and measured on a GPU.

    python -m benchmarks.memory                      # 135M to 7B, all weights and rank 16
    python -m benchmarks.memory --shapes 7b --ranks 16 --budgets 2048 4096 8192

Random bfloat16 weights in the shape of SmolLM2 and Qwen2.5; one update over two full passes (or
over `--rows` rows) of `--length` tokens, all of them actions, after one that warms up. `predicted`
is without the engine, which is not made; `peak` is what torch allocated at most, `reserved` what
its allocator held, `driver` what the GPU says is gone. Without `--budgets` the plan chooses the
tokens of a pass. A case that does not fit is not tried. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import torch

from benchmarks.random_models import SHAPES, random_model
from ludic.memory.plan import HEADROOM
from ludic.sharding.world import World
from ludic.training import TrainerConfig, make_algorithm
from ludic.training.metrics.stats import StatBuffer
from ludic.training.update.budget import as_planned, capacity, plan_update
from ludic.training.update.calibrate import synthetic_batch
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.packing import lay_out
from ludic.training.update.passes import Passes
from ludic.training.update.planning import Cost
from ludic.training.update.policy import Policy

NEEDS = ("gpu",)
GB = 1e9


def measure(
    shape: str,
    rank: int,
    budget: int | None,
    rows: int | None,
    length: int,
    checkpointing: bool | None,
) -> dict[str, float]:
    """The figures of one update, in GB."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    model = random_model(shape, rank)
    world = World(device=torch.device("cuda", 0))
    cfg = TrainerConfig(
        max_seq_len=length,
        micro_token_budget=budget,
        gradient_checkpointing=checkpointing,
        precision="bfloat16",
    )
    plan = plan_update(model, cfg, world)
    assert plan is not None
    how = plan.training
    figures: dict[str, float] = {
        "tokens_of_a_pass": how.tokens,
        "checkpointing": how.checkpointing,
        "kept_logits": how.keep_logits,
        "predicted_gb": round((plan.total - plan.parts["fragmentation"]) / GB, 2),
    }
    if plan.total > (1 - HEADROOM) * capacity(model, world):
        return figures | {"fits": False}
    cfg = as_planned(cfg, plan)
    optimizer = MasterAdamW(model.named_parameters(), cfg)
    loss = make_algorithm("grpo").loss
    passes = Passes(Policy(model, cfg), loss, cfg, world, Cost())
    rows = rows or 2 * (how.tokens // length)  # two passes: the second beside the first's gradients
    batch = lay_out(synthetic_batch(rows * length, length, 1.0, model.config.vocab_size))
    seconds = 0.0
    for turn in range(2):
        if turn:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        passes.accumulate(batch, optimizer, StatBuffer(), version=0, proximal=None)
        optimizer.step(0.0)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated()
    figures |= {
        "peak_gb": round(peak / GB, 2),
        "predicted_over_peak": round(figures["predicted_gb"] * GB / peak, 3),
        "reserved_gb": round(torch.cuda.max_memory_reserved() / GB, 2),
        "driver_gb": round((before - torch.cuda.mem_get_info()[0]) / GB, 2),
        "update_s": round(seconds, 3),
        "tokens_per_s": round(rows * length / seconds),
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    shapes = ["135m", *SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes)
    parser.add_argument("--ranks", nargs="+", type=int, default=[0, 16], help="of LoRA; 0: none")
    parser.add_argument("--budgets", nargs="+", type=int, default=[0], help="0: as planned")
    parser.add_argument("--rows", type=int, help="as many as fill two passes, if left out")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--checkpointing", action="store_true", default=None)
    parser.add_argument("--expandable", action="store_true", help="segments that can grow")
    args = parser.parse_args()
    if args.expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    found: dict[str, Any] = {}
    for shape in args.shapes:
        for rank in args.ranks:
            for budget in args.budgets:
                figures = measure(
                    *(shape, rank, budget or None, args.rows, args.length, args.checkpointing)
                )
                name = f"{shape}{f'_lora{rank}' if rank else ''}{f'_{budget}' if budget else ''}"
                found[name] = figures
                print(name, figures, flush=True)
    print(json.dumps(found | {"gpu": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main()
