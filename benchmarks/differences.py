"""How much of a model's weights one optimizer step changes, and what a difference of them costs.

The model of `--model`, else SmolLM2 where its folder is there (`python -m tools.smollm2`), else the
tiny model, in bfloat16,
with the trainer's own optimizer: float32 masters, dithered. The gradient is that of the
log-likelihood of one sentence. The first step of AdamW moves every master by the learning rate,
whatever its gradient. Each rate begins at the same weights.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.publish import load
from ludic.distributed.differences import apply_all, encode_all
from ludic.training.config import TrainerConfig
from ludic.training.update.optimizer import MasterAdamW

TEXT = (
    "Question: Natalia sold 48 clips in April and half as many in May. How many in all? Answer: 72"
)


def size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def step(model: Any, ids: Tensor, optimizer: MasterAdamW, rate: float) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.accumulate()
    optimizer.step(rate)


def measure(model: nn.Module, ids: Tensor, rate: float, steps: int) -> list[dict[str, float]]:
    """For each step: the share of elements that changed, the share of bytes, and the seconds."""
    optimizer = MasterAdamW(model.named_parameters(), TrainerConfig(learning_rate=rate))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    elements = sum(tensor.numel() for tensor in weights.values())
    held = {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}
    figures = []
    for _ in range(steps):
        step(model, ids, optimizer, rate)
        now = {name: tensor.cpu() for name, tensor in weights.items()}
        changed = sum(
            int((now[n].view(torch.int16) != held[n].view(torch.int16)).sum()) for n in held
        )
        began = time.perf_counter()
        difference = encode_all(held, now)
        encoded = time.perf_counter()
        apply_all(difference, held)
        applied = time.perf_counter()
        assert all(torch.equal(held[name], tensor) for name, tensor in now.items())
        figures.append(
            {
                "changed_share": changed / elements,
                "bytes_share": size(difference) / size(weights),
                "encode_s": encoded - began,
                "apply_s": applied - encoded,
            }
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the tiny model in any case")
    parser.add_argument("--model", help="a folder with a model, not SmolLM2's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-6])
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    model, tokenizer = load(args.tiny, args.model)
    model.to(args.device, torch.bfloat16)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.tensor([tokenizer.encode(TEXT)], device=args.device)
    result: dict[str, Any] = {"bytes": size(start)}
    for rate in args.rates:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name])
        for number, figures in enumerate(measure(model, ids, rate, args.steps), start=1):
            print(f"{rate:g}, step {number}:", {k: round(v, 4) for k, v in figures.items()})
            result[f"{rate:g}/{number}"] = figures
    print(json.dumps(result))


if __name__ == "__main__":
    main()
