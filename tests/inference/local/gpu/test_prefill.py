"""Which prompts are computed together, and what they are padded to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ludic.inference.local.arena import Arena, KVShape
from ludic.inference.local.attention import AttentionCall, Masks
from ludic.inference.local.gpu.layouts import RectangleLayout
from ludic.inference.local.gpu.prefill import Prefill
from ludic.inference.local.scheduler import Work
from ludic.memory.engine import MAX_TOKENS


@pytest.fixture
def prefill() -> Prefill:
    shape = KVShape(1, 1, 16, torch.float32, torch.device("cpu"))
    nothing: Any = None
    return Prefill(nothing, Arena(shape, 32_768, 1, 1), nothing)


def work(count: int, computed: int = 0) -> Work:
    sequence: Any = SimpleNamespace(computed=computed)
    return Work(sequence, count)


def counts(batches: list[list[Work]]) -> list[list[int]]:
    return [[item.count for item in batch] for batch in batches]


def test_a_long_prompt_is_computed_without_padding(prefill: Prefill) -> None:
    assert prefill._sizes([work(16_000)])[:2] == (1, 16_000)
    assert prefill._sizes([work(16_000)] * 2)[:2] == (2, 16_000)


def test_short_prompts_are_padded_to_few_sizes(prefill: Prefill) -> None:
    assert prefill._sizes([work(30)])[:2] == (4, 32)
    assert prefill._sizes([work(100)] * 20)[:2] == (64, 128)


def test_a_short_chunk_does_not_join_a_long_prompt(prefill: Prefill) -> None:
    assert counts(prefill.batches([work(16_000), work(20, 9000)])) == [[20], [16_000]]
    assert counts(prefill.batches([work(16_000), work(20)])) == [[20], [16_000]]


def test_a_fresh_prompt_needs_no_mask_because_of_another(prefill: Prefill) -> None:
    assert counts(prefill.batches([work(9000), work(9001, 500)])) == [[9000], [9001]]
    assert counts(prefill.batches([work(9000), work(9001)])) == [[9000, 9001]]


def test_short_chunks_of_any_kind_go_together(prefill: Prefill) -> None:
    assert counts(prefill.batches([work(300), work(20, 5), work(7)])) == [[7, 20, 300]]


def test_a_pass_stays_within_the_token_budget(prefill: Prefill) -> None:
    batches = prefill.batches([work(4096)] * 20)
    assert sum(map(len, batches)) == 20
    assert all(4096 * len(batch) <= MAX_TOKENS for batch in batches)


def test_only_a_window_that_a_prompt_leaves_needs_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    g, width = torch.Generator().manual_seed(0), 12
    q, k, v = torch.randn(3, width, 2, 16, generator=g)
    positions = torch.arange(width)[None]
    windows: list[int | None] = []
    make = Masks.get

    def noted(masks: Masks, window: int | None, *rest: Any) -> torch.Tensor:
        windows.append(window)
        return make(masks, window, *rest)

    monkeypatch.setattr(Masks, "get", noted)

    def attend(window: int | None) -> torch.Tensor:
        kv, slots = torch.zeros(1, 2, 1, 2, width, 16), torch.tensor([0])
        target = torch.zeros_like(positions)
        layout = RectangleLayout(kv, slots, positions, target, width, None, fresh=True)
        return layout.attend(AttentionCall(0, q, k, v, 0.25, window))

    whole = attend(None)
    assert torch.equal(attend(width), whole)
    assert windows == []
    torch.testing.assert_close(attend(4)[:4], whole[:4])
    assert not torch.allclose(attend(4)[4:], whole[4:])
    assert set(windows) == {4}
