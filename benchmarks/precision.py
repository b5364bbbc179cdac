"""Updates on short packed sequences in each precision: tokens per second, and the first update.

    python -m benchmarks.precision       # one GPU: SmolLM2-135M, 512 sequences of about 60 tokens

An update is forward, backward and optimizer step, as the trainer takes them. `first_s` is the first
one, with what is compiled for it; run each way in a process of its own (`--precision tf32
--head-kernels compiled`) to compare those, since compiled code stays. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, get_args

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.agentic_batch import one_completion
from ludic.plumbing.model_parts import vocabulary_size
from ludic.plumbing.precision import Precision, weights_dtype
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch
from ludic.sharding.world import World
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.config import HeadKernels, TrainerConfig
from ludic.training.metrics.stats import StatBuffer
from ludic.training.update.optimizer import MasterAdamW
from ludic.training.update.packing import lay_out
from ludic.training.update.passes import Passes
from ludic.training.update.planning import attention_cost
from ludic.training.update.policy import Policy
from tools import smollm2

NEEDS = ("gpu",)


def short_batch(sequences: int, vocab: int) -> SAWBatch:
    """Sequences of 48 to 72 tokens, of which the last 8 to 24 are actions."""
    rng = np.random.default_rng(0)
    items = []
    for index in range(sequences):
        length, actions = int(rng.integers(48, 73)), int(rng.integers(8, 25))
        ids, weight = rng.integers(0, vocab, length), float(rng.normal())
        items.append(one_completion(ids, actions, weight, vocab, rollout_id=str(index)))
    return make_batch(items)


def measure(precision: Precision, args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    model = AutoModelForCausalLM.from_pretrained(smollm2.path(), dtype=weights_dtype(precision))
    model.to(device).eval()
    batch = short_batch(args.sequences, vocabulary_size(model))
    cfg = TrainerConfig(
        learning_rate=1e-6,
        precision=precision,
        compile=args.compile,
        head_kernels=args.head_kernels,
        micro_token_budget=args.micro_token_budget,
    )
    policy = Policy(model, cfg)
    passes = Passes(policy, make_grpo().loss, cfg, World(device=device), attention_cost(model))
    optimizer = MasterAdamW(model.named_parameters(), cfg)
    layout = lay_out(batch)
    tokens = sum(p.input_ids.size for p in layout.packed)

    def update() -> float:
        begin = time.perf_counter()
        passes.accumulate(layout, optimizer, StatBuffer(), version=0, proximal=None)
        optimizer.step(cfg.learning_rate)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    first = update()
    best = min(update() for _ in range(args.repeats))
    return {
        "first_s": round(first, 3),
        "update_s": round(best, 4),
        "tokens_per_s": round(tokens / best),
        "tf32_outside": torch.backends.cuda.matmul.allow_tf32,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--micro-token-budget", type=int, default=32768)
    parser.add_argument("--precision", choices=get_args(Precision), help="default: all four")
    parser.add_argument("--head-kernels", choices=get_args(HeadKernels), default="auto")
    parser.add_argument("--compile", action="store_true", help="the decoder layers, too")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for precision in [args.precision] if args.precision else get_args(Precision):
        results[precision] = measure(precision, args)
        print(f"{precision:10s} {results[precision]}", flush=True)
    print(json.dumps({"device": args.device, "sequences": args.sequences, **results}))


if __name__ == "__main__":
    main()
