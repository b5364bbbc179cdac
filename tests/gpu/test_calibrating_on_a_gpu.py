"""A budget that was found for a trainer beside an engine holds when both are there."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.inference import LocalChatClient
from ludic.inference.local.build import engine_memory
from ludic.inference.tiny import tiny_tokenizer
from ludic.runs.planning import host_gb_s
from ludic.saw.items import SAWBatch
from ludic.training import Trainer, TrainerConfig, make_reinforce
from ludic.training.update.calibrate import Calibration, calibrate, synthetic_batch
from tests.inference.local.asking import ask_all, request
from tests.inference.local.trained import FAMILIES, built

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHARE = 24 << 30
"""What trainer and engine may take together; the rest of the card counts as taken."""
HEADROOM = 0.08
SETTINGS: dict[str, Any] = {"max_seq_len": 2048, "gradient_checkpointing": True}


class Again:
    def __init__(self, batch: SAWBatch) -> None:
        self.batch = batch

    async def next_batch(self) -> SAWBatch:
        return self.batch


def fresh() -> Any:
    family = FAMILIES["qwen2"]
    return built(family, {**family.shape, "num_hidden_layers": 8}, "cuda").bfloat16()


def budget_beside(taken: int) -> Calibration:
    try:
        return calibrate(
            fresh(),
            make_reinforce().loss,
            TrainerConfig(**SETTINGS),
            headroom=HEADROOM,
            reserved_bytes=taken,
        )
    finally:
        gc.collect()
        torch.cuda.empty_cache()


async def test_an_update_beside_an_engine_stays_within_their_share(tmp_path: Path) -> None:
    model = fresh()
    engine: dict[str, Any] = {"max_slots": 64, "max_context_tokens": 2048}
    foretold, vocab = engine_memory(model, **engine).total, model.config.vocab_size
    del model
    total = torch.cuda.get_device_properties(0).total_memory
    elsewhere = max(int(total * (1 - HEADROOM)) - SHARE, 0)
    alone, beside = budget_beside(elsewhere), budget_beside(elsewhere + foretold)
    assert beside.micro_token_budget < alone.micro_token_budget
    assert beside.peak_bytes + foretold <= SHARE
    torch.cuda.reset_peak_memory_stats()
    model, budget = fresh(), beside.micro_token_budget
    async with LocalChatClient(model, tiny_tokenizer(), **engine) as client:
        trainer = Trainer(
            model=model,
            algo=make_reinforce(),
            batch_source=Again(synthetic_batch(budget, 2048, 0.5, vocab)),
            cfg=TrainerConfig(**SETTINGS, micro_token_budget=budget, run_dir=tmp_path),
        )
        asks = [
            request(range(i, i + 1000), seed=i, max_tokens=200, ignore_eos=True) for i in range(64)
        ]
        await asyncio.gather(ask_all(client, asks), trainer.train_step())
        trainer.close()
    peak = torch.cuda.max_memory_allocated()
    gib = 2**30
    print(
        f"\nbudget {alone.micro_token_budget} alone, {budget} beside an engine; peak "
        f"{peak / gib:.1f} of {SHARE / gib:.0f} GiB, of which {foretold / gib:.1f} foretold"
    )
    assert peak <= SHARE


def test_the_link_to_the_host_is_measured_with_copies_both_ways() -> None:
    before = torch.cuda.memory_allocated()
    assert host_gb_s(torch.device("cuda"), size=1 << 24) > 0
    assert torch.cuda.memory_allocated() == before
