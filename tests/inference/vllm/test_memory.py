"""How much of a GPU a server gets that shares it with a trainer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import OutOfMemoryError
from ludic.inference.vllm.memory import (
    FIXED,
    GIB,
    HEADROOM,
    ServerNeed,
    server_need,
    share_beside_trainer,
)

SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
WEIGHTS = 2 * 134_515_008


def need(**changes: int | None) -> ServerNeed:
    asked = {"weights": WEIGHTS, "item": 2, "slots": 64, "context": 1024, **changes}
    found = server_need(SMOLLM2, **asked)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_the_cache_is_that_of_the_slots_at_full_length() -> None:
    per_token = 2 * 30 * 3 * 64 * 2
    assert need().least_cache == 1024 * per_token
    assert need().whole_cache == 64 * 1024 * per_token
    assert need(context=None).least_cache == 8192 * per_token
    assert need(gpus=2).whole_cache * 2 == need().whole_cache


def test_a_step_is_larger_with_more_tokens_and_more_slots() -> None:
    assert need().step > FIXED
    assert need(batched_tokens=32768).step > need().step
    assert need(slots=512).step - need().step == (512 - 64) * 49152 * 16


def test_a_small_model_takes_little_of_a_large_gpu() -> None:
    share = share_beside_trainer(140 * GIB, 139 * GIB, 20 * GIB, need())
    assert 0.04 < share < 0.08


def test_a_model_of_unknown_size_gets_half_of_what_the_trainer_leaves() -> None:
    assert server_need({}, weights=1, item=2, slots=1, context=1) is None
    share = share_beside_trainer(100 * GIB, 85 * GIB, 40 * GIB, None)
    assert share == pytest.approx((85 - 40 - 100 * HEADROOM) / 2 / 100, abs=1e-4)


@given(
    free=st.integers(0, 80 * GIB),
    trainer=st.integers(0, 80 * GIB),
    slots=st.integers(1, 2048),
)
def test_both_fit_or_it_is_said(free: int, trainer: int, slots: int) -> None:
    total, server = 80 * GIB, need(slots=slots)
    left = free - trainer - int(HEADROOM * total)
    if left < server.least:
        with pytest.raises(OutOfMemoryError, match=r"inference\.vllm\.gpu_memory"):
            share_beside_trainer(total, free, trainer, server)
        return
    share, rounding = share_beside_trainer(total, free, trainer, server), total / 10_000
    assert server.least <= share * total <= min(server.wanted, left) + rounding
