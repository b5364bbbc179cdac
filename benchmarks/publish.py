"""How long new weights take to the sampler: the in-process engine, and a live vLLM server.

Publishes SmolLM2 where its folder is there (`python -m tools.smollm2`), else the tiny model. vLLM
is the one of `LUDIC_VLLM_PYTHON`, or of `.venv-vllm` (`make vllm`); without it `vllm_s` is null.
Every publish is verified: checksums of what arrived, and a canary scored on both sides. The table
shows each stage's median; stages overlap, and what workers say of themselves is part of others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ludic.distributed.interfaces import PublishReport
from ludic.distributed.local import LocalPolicyPublisher
from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.errors import LudicError
from ludic.inference.local import LocalChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import ServerSettings, VLLMServer, free_port
from ludic.sharding.weights import ModelWeights

ROOT = Path(__file__).resolve().parent.parent


def load(tiny: bool) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    from tools import smollm2

    if not tiny:
        try:
            folder = smollm2.path()
        except (LudicError, FileNotFoundError, RuntimeError) as exc:
            print(f"the tiny model instead of SmolLM2: {exc}")
        else:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            return model.eval(), AutoTokenizer.from_pretrained(folder)
    return tiny_model(hidden_size=64, heads=2, kv_heads=1), tiny_tokenizer()


async def local_seconds(model: Any, tokenizer: Any, times: int) -> float:
    """The median publish to an engine that shares the module: the pause and the version."""
    async with LocalChatClient(model, tokenizer, max_slots=4, max_context_tokens=256) as client:
        publisher = LocalPolicyPublisher(client)
        found = []
        for version in range(1, times + 1):
            start = time.perf_counter()
            async with publisher.updating():
                await publisher.publish(ModelWeights(model), version)
            found.append(time.perf_counter() - start)
    return statistics.median(found)


async def vllm_publishes(model: Any, url: str, times: int) -> list[Any]:
    """The reports of so many verified publishes to a live server."""
    async with VLLMChatClient(url, model="policy") as client:
        publisher = BroadcastPolicyPublisher(client, timeout_s=300)
        return [await publisher.publish(ModelWeights(model), v) for v in range(1, times + 1)]


def stage_medians(reports: Sequence[PublishReport]) -> dict[str, float]:
    """The median seconds of each stage that every publish had, the first left out: it also warms
    up the trainer and writes the canary's prompt."""
    parts = [r.details["stages"] for r in (reports[1:] or reports)]
    shared = [name for name in parts[0] if all(name in p for p in parts)]
    return {name: statistics.median(p[name] for p in parts) for name in shared}


def stage_table(medians: Mapping[str, float]) -> str:
    """The medians as lines of text."""
    return "\n".join(f"  {name:<18} {1000 * took:9.1f} ms" for name, took in medians.items())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time the way of new weights to the sampler.")
    parser.add_argument("--times", type=int, default=5, help="publishes to take the median of")
    parser.add_argument("--tiny", action="store_true", help="the tiny model, not SmolLM2")
    args = parser.parse_args()
    model, tokenizer = load(args.tiny)
    size = sum(t.numel() * t.element_size() for _, t in ModelWeights(model))
    figures: dict[str, Any] = {
        "local_s": asyncio.run(local_seconds(model, tokenizer, args.times)),
        "vllm_s": None,
        "bytes": size,
    }
    python = os.environ.get("LUDIC_VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        settings = ServerSettings(
            folder,
            served_name="policy",
            port=free_port(),
            max_model_len=256,
            max_num_seqs=8,
            env={"HF_HUB_OFFLINE": "1"},
        )
        try:
            with VLLMServer(settings, python=python) as server:
                reports = asyncio.run(vllm_publishes(model, server.url, args.times))
        except LudicError as exc:
            print(f"no figures for vLLM: {exc}", file=sys.stderr)
        else:
            figures["vllm_s"] = statistics.median(r.seconds for r in reports)
            for part in ("prepare_s", "stall_s", "canary_max"):
                figures[part] = statistics.median(r.details[part] for r in reports)
            figures["plane"] = reports[0].details["plane"]
            figures["stages"] = stage_medians(reports)
            print(stage_table(figures["stages"]))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
