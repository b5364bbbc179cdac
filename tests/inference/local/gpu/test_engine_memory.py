"""What an engine is said to take is what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ludic.errors import ConfigError
from ludic.inference.local import LocalChatClient
from ludic.inference.local.arena import SlotMemory
from ludic.inference.local.build import engine_memory, kv_shape
from ludic.inference.tiny import tiny_model

GPU = torch.device("cuda")


@pytest.mark.parametrize("slots", [1, 16, 100])
@pytest.mark.parametrize("context", [2, 64, 65, 1000])
def test_the_slots_are_counted_to_the_byte(slots: int, context: int) -> None:
    model = tiny_model(max_position_embeddings=1000)
    found = engine_memory(model, max_slots=slots, max_context_tokens=context)
    shape = kv_shape(model, model.config)
    memory = SlotMemory(shape, max_slots=slots, max_tokens=context, single_length=True)
    assert found.slots == memory.bytes


async def test_an_engine_that_runs_ahead_has_the_slots_that_were_counted(tokenizer: Any) -> None:
    model = tiny_model()
    options: Any = {"max_slots": 12, "max_context_tokens": 200}
    async with LocalChatClient(model, tokenizer, pipelined=True, **options) as client:
        assert engine_memory(model, **options).slots == client._scheduler.memory.bytes


def test_slots_that_grow_are_counted_at_their_largest() -> None:
    model = tiny_model(max_position_embeddings=256)
    shape = kv_shape(model, model.config)
    memory = SlotMemory(shape, max_slots=9, max_tokens=256)
    for length in memory.lengths:
        arena = memory.arena(length)
        arena.kv = arena._allocate(arena.max_capacity)
    found = engine_memory(model, max_slots=9, max_context_tokens=256, deterministic=True)
    assert found.slots == memory.bytes


def test_what_is_not_set_is_what_an_engine_on_that_device_takes() -> None:
    model = tiny_model(max_position_embeddings=5000)
    here, there = (engine_memory(model, max_slots=4, device=d) for d in (None, GPU))
    assert here.slots == engine_memory(model, max_slots=4, max_context_tokens=5000).slots
    assert there.slots == engine_memory(model, max_slots=4, max_context_tokens=4096).slots
    per_token = kv_shape(model, model.config).bytes_per_token
    assert there.prefix_cache == (4 << 30) // per_token * per_token
    assert engine_memory(model, max_slots=4, prefix_cache_tokens=0).prefix_cache == 0


def test_more_slots_and_longer_ones_never_take_less() -> None:
    model = tiny_model(max_position_embeddings=4096)
    totals = [
        [engine_memory(model, max_slots=n, max_context_tokens=t).total for t in (64, 512, 4096)]
        for n in (1, 64, 512)
    ]
    assert all(row == sorted(row) for row in totals)
    assert all(list(column) == sorted(column) for column in zip(*totals, strict=True))


def test_a_context_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="positions"):
        engine_memory(tiny_model(max_position_embeddings=64), max_slots=4, max_context_tokens=65)
