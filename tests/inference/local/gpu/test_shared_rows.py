"""Decode attention where several programs share a row, by Triton's interpreter, against float64."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from ludic.inference.local import LocalChatClient, build
from ludic.inference.local.attention import rotate
from ludic.inference.local.gpu import prefill
from ludic.inference.local.gpu.device_batch import DeviceBatch, GraphCache
from ludic.inference.local.gpu.layouts import RowsLayout
from tests.inference.local.asking import plain_logprobs, request
from tests.inference.local.test_families import family

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or `make setup`")

LENGTH, DIM, KV_HEADS = 320, 16, 2
# Nothing before the new token, around the first block, and at the edges of runs of 64 and of 192.
POSITIONS = (0, 63, 64, 65, 192, 319)


class Step(NamedTuple):
    """What `attend_rows` takes, and what it should return."""

    q: Tensor
    k: Tensor
    v: Tensor
    rotary: tuple[Tensor, Tensor]
    cache: tuple[Tensor, Tensor]
    positions: Tensor
    wanted: Tensor

    def attend(self, kernels: Any, window: int | None, parts: int) -> Tensor:
        cache = (self.cache[0].clone(), self.cache[1].clone())
        given = (self.q, self.k, self.v, self.rotary, cache, self.positions)
        out: Tensor = kernels.attend_rows(*given, 0.3, window, parts)
        return out

    def only(self, row: int) -> Step:
        here = slice(row, row + 1)
        (cos, sin), (keys, values) = self.rotary, self.cache
        return Step(
            self.q[here],
            self.k[here],
            self.v[here],
            (cos[here], sin[here]),
            (keys[here], values[here]),
            self.positions[here],
            self.wanted[here],
        )


def step_of(heads: int, window: int | None) -> Step:
    """Rows of very different lengths; NaN wherever a row must not look."""
    g, rows = torch.Generator().manual_seed(heads), len(POSITIONS)
    flat = torch.randn(rows, heads + 2 * KV_HEADS, DIM, generator=g)
    q, k, v = flat.tensor_split([heads, heads + KV_HEADS], 1)
    cos, sin = torch.randn(2, rows, DIM, generator=g)
    keys, values = torch.randn(2, rows + 1, KV_HEADS, LENGTH, DIM, generator=g)
    exact = cos.double(), sin.double()
    queries, new_keys = rotate(q.double(), exact), rotate(k.double(), exact)
    wanted = []
    for row, position in enumerate(POSITIONS):
        first = max(0, position + 1 - window) if window else 0
        old = slice(first, position)
        ks = torch.cat([keys[row, :, old].double(), new_keys[row, :, None]], 1)
        vs = torch.cat([values[row, :, old].double(), v[row, :, None].double()], 1)
        ks, vs = (x.repeat_interleave(heads // KV_HEADS, 0) for x in (ks, vs))
        weights = torch.softmax(torch.einsum("hd,htd->ht", queries[row], ks) * 0.3, -1)
        wanted.append(torch.einsum("ht,htd->hd", weights, vs))
        for part in (keys, values):
            part[row, :, :first] = part[row, :, position:] = torch.nan
    return Step(q, k, v, (cos, sin), (keys, values), torch.tensor(POSITIONS), torch.stack(wanted))


@pytest.fixture
def uninitialised_is_nan() -> Any:
    """What `torch.empty` returns holds NaN, and not by chance zeros."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialised_is_nan")
@pytest.mark.parametrize(
    ("parts", "window", "heads"),
    [(1, None, 2), (2, None, 6), (5, None, 6), (2, 100, 2), (5, 100, 6), (5, 1, 2)],
)
def test_parts_of_a_row_make_the_whole(
    kernels: Any, parts: int, window: int | None, heads: int
) -> None:
    assert torch.empty(3).isnan().all()
    step = step_of(heads, window)
    out = step.attend(kernels, window, parts)
    torch.testing.assert_close(out.double(), step.wanted, atol=1e-5, rtol=1e-5)


def test_a_shared_row_leaves_its_key_and_value_in_its_slot_and_nothing_elsewhere(
    kernels: Any,
) -> None:
    step = step_of(2, None)
    keys, values = step.cache
    rows, zeros = range(len(POSITIONS)), torch.zeros(len(POSITIONS), DIM)
    wanted = keys.clone(), values.clone()
    wanted[0][rows, :, step.positions] = step.k
    wanted[1][rows, :, step.positions] = step.v
    unturned = (zeros + 1, zeros)
    given = (step.q, step.k, step.v, unturned, step.cache, step.positions)
    kernels.attend_rows(*given, 0.3, None, 5)
    for part, whole in zip((keys, values), wanted, strict=True):
        torch.testing.assert_close(part, whole, atol=0, rtol=0, equal_nan=True)


def test_other_rows_change_no_bit_of_a_row(kernels: Any) -> None:
    step = step_of(6, None)
    together = step.attend(kernels, None, 5)
    assert torch.equal(step.only(4).attend(kernels, None, 5)[0], together[4])


def test_a_value_that_is_not_finite_is_seen_in_whichever_part_it_is(kernels: Any) -> None:
    step = step_of(2, None)
    step.cache[1][5, 1, 200] = torch.nan
    out = step.only(5).attend(kernels, None, 5)[0]
    assert out[1].isnan().all()
    assert not out[0].isnan().any()


def test_few_long_rows_are_shared_and_many_or_short_ones_are_not(kernels: Any) -> None:
    from ludic.inference.local.gpu.kernels import attention

    h200, heads = 132, 2
    assert attention.parts_for(128 * heads, 384, h200) == 1
    assert attention.parts_for(128 * heads, 16_448, h200) == 1
    assert attention.parts_for(8 * heads, 384, h200) == 1
    assert attention.parts_for(8 * heads, 16_448, h200) == 16
    assert attention.parts_for(16 * heads, 16_448, h200) == 8
    assert attention.parts_for(16 * heads, 1024, h200) == 1
    for slots in range(1, 200):
        for length in (64, 1024, 4096, 131_072):
            parts = attention.parts_for(slots * heads, length, h200)
            assert parts == 1 or parts * attention._LEAST_RUN <= length
            assert parts <= attention._MOST_PARTS
    assert kernels.row_parts(8, heads, 16_448, torch.device("cpu")) == 1


def test_the_last_rows_of_a_large_engine_are_shared(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "row_parts", lambda rows, *_: 64 // rows)
    arena = SimpleNamespace(
        kv=torch.zeros(1), length=16_448, shape=SimpleNamespace(kv_heads=2), tenants=[]
    )
    graphs = GraphCache(torch.device("cpu"), capture=False, weights=list)
    shared: list[tuple[int, int]] = []

    def forward(ids: Any, positions: Any, layout: RowsLayout) -> torch.Tensor:
        shared.append((ids.shape[1], layout.parts))
        return torch.zeros(ids.shape[1], 8)

    batch = DeviceBatch(cast(Any, forward), cast(Any, arena), 64, 8, graphs, kernels)
    for running in (64, 40, 20, 3):
        batch.step_logits(*batch.sizes(running, 100))
    assert shared == [(64, 1), (64, 1), (32, 2), (16, 4)]


async def test_an_engine_that_shares_rows_gives_the_logprobs_of_a_plain_pass(
    kernels: ModuleType, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ludic.inference.local.gpu.kernels import attention

    windows = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    model = family("Qwen2", head_dim=16, **windows)
    ask = request(range(40, 60), seed=0, max_tokens=2)
    merged = []
    launch = attention._merge_kernel.run

    def noted(*args: Any, **options: Any) -> Any:
        merged.append(options["PARTS"])
        return launch(*args, **options)

    monkeypatch.setattr(attention._merge_kernel, "run", noted)
    monkeypatch.setattr(build, "usable_kernels", lambda shape: kernels)
    monkeypatch.setattr(kernels, "row_parts", lambda *_: 4)
    monkeypatch.setattr(attention, "_SHARED_BLOCK", 16)
    monkeypatch.setattr(prefill, "_width", lambda tokens: tokens)
    monkeypatch.setattr(prefill, "_count", lambda sequences, width: sequences)
    options: Any = {"deterministic": False, "pipelined": True, "max_slots": 2}
    async with LocalChatClient(model, tokenizer, max_context_tokens=64, **options) as client:
        answer = await client.complete_tokens(ask)
    # One layer sees all. A window of 9 tokens, which may begin within a block, lies in two runs.
    assert set(merged) == {2, 4}
    assert answer.trace is not None
    assert answer.trace.completion_logprobs == pytest.approx(
        plain_logprobs(model, answer), abs=2e-5
    )
