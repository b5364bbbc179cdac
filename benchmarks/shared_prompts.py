"""Forward and backward over groups that share a prompt: computed once, and for every row.

    python -m benchmarks.shared_prompts                  # CPU, tiny model
    python -m benchmarks.shared_prompts --device cuda    # random weights in SmolLM2-135M's shape

512 rows (64 on a CPU) in groups of 16: a prompt of 60 tokens and completions of 12. Both ways are
timed in turn, from the same batch, after a check that their losses and gradients agree. The last
line is JSON: seconds of both, their ratio, and the tokens that each computes.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, get_args

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.agentic_batch import one_completion
from benchmarks.random_models import smollm2
from ludic.inference.tiny import tiny_model
from ludic.plumbing.model_parts import vocabulary_size
from ludic.plumbing.precision import Precision, float32_products, weights_dtype
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch
from ludic.sharding.world import World
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.config import TrainerConfig
from ludic.training.metrics.stats import StatBuffer
from ludic.training.update.checks import check_packing
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.packing import lay_out
from ludic.training.update.passes import Passes
from ludic.training.update.planning import attention_cost
from ludic.training.update.policy import Policy


def grouped(rows: int, members: int, prompt: int, completion: int, vocab: int) -> SAWBatch:
    """Rows in groups that share a prompt; every completion is another."""
    rng, items, start = np.random.default_rng(0), [], np.zeros(0, np.int64)
    for row in range(rows):
        if row % members == 0:
            start = rng.integers(0, vocab, prompt)
        ids = np.concatenate([start, rng.integers(0, vocab, completion)])
        names = {"rollout_id": str(row), "group_id": str(row // members)}
        items.append(one_completion(ids, completion, float(rng.normal()), vocab, **names))
    return make_batch(items)


def measure(precision: Precision, args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = LlamaForCausalLM(smollm2()) if device.type == "cuda" else tiny_model(layers=4)
    model = model.to(device, weights_dtype(precision)).eval()
    batch = grouped(args.rows, args.members, args.prompt, args.completion, vocabulary_size(model))
    cfg = TrainerConfig(learning_rate=1e-6, precision=precision)
    policy = Policy(model, TrainerConfig(precision=precision))
    with float32_products(precision):
        check_packing(policy, device)
    passes = Passes(policy, make_grpo().loss, cfg, World(device=device), attention_cost(model))
    optimizer = MasterAdamW(model.named_parameters(), cfg)
    layout = lay_out(batch)
    if not policy.shares:
        raise SystemExit("the trial of shared rows failed: nothing is shared, nothing to compare")

    def update(share: bool) -> tuple[float, float, torch.Tensor, int]:
        policy.sharing, stats = share, StatBuffer()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work = passes.accumulate(layout, optimizer, stats, version=0, proximal=None)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        gradient = torch.cat([g.flatten().double() for g in optimizer.gradients()])
        optimizer.zero_grad()
        return seconds, stats.reduce()["train/loss"], gradient, work.tokens

    (_, loss, gradient, tokens), (_, plain_loss, plain, whole_tokens) = update(True), update(False)
    gap = ((gradient - plain).norm() / plain.norm()).item()
    if abs(loss - plain_loss) > 0.02 or gap > 0.1:
        raise SystemExit(f"loss {loss} and {plain_loss}, gradients apart by {gap}")
    del gradient, plain
    seconds = {share: min(update(share)[0] for _ in range(args.repeats)) for share in (True, False)}
    return {
        "shared_s": round(seconds[True], 4),
        "whole_s": round(seconds[False], 4),
        "speedup": round(seconds[False] / seconds[True], 2),
        "tokens": tokens,
        "whole_tokens": whole_tokens,
        "gradient_gap": float(f"{gap:.2g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, help="default: 512, on a CPU 64")
    parser.add_argument("--members", type=int, default=16, help="rows that share a prompt")
    parser.add_argument("--prompt", type=int, default=60)
    parser.add_argument("--completion", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=get_args(Precision), help="default: all four")
    args = parser.parse_args()
    args.rows = args.rows or (512 if args.device == "cuda" else 64)
    if args.device == "cpu":
        torch.set_num_threads(1)
        args.precision = args.precision or "float32"
    results: dict[str, Any] = {}
    for precision in [args.precision] if args.precision else get_args(Precision):
        results[precision] = measure(precision, args)
        print(f"{precision:10s} {results[precision]}", flush=True)
    print(json.dumps({"device": args.device, "rows": args.rows, **results}))


if __name__ == "__main__":
    main()
