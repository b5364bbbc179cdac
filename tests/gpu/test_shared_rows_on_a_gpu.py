"""Decode attention where programs share long rows: the compiled kernels, graphs and engines."""

import asyncio
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.inference import LocalChatClient, SamplingConfig
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.tiny import tiny_tokenizer
from tests.gpu.test_kernels_on_a_gpu import numbers, off
from tests.inference.local.test_families import family

pytestmark = pytest.mark.gpu

LENGTH, HEADS, KV_HEADS, DIM = 16_448, 12, 2, 128
POSITIONS = (16_447, 16_384, 9000, 8191, 513, 512, 64, 0)


class Rows(NamedTuple):
    """Eight rows of very different lengths in the shape of a 1.5B."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor

    def attend(self, window: int | None, parts: int) -> Tensor:
        from ludic.inference.local.gpu import kernels

        given = (self.q, self.k, self.v, None, (self.keys, self.values), self.positions)
        out: Tensor = kernels.attend_rows(*given, DIM**-0.5, window, parts)
        return out


@pytest.fixture
def rows() -> Rows:
    n = len(POSITIONS)
    q, k, v = (numbers(n, heads, DIM, seed=i) for i, heads in enumerate((HEADS, 2, 2)))
    keys, values = (numbers(n + 1, KV_HEADS, LENGTH, DIM, seed=seed) for seed in (3, 4))
    positions = torch.tensor(POSITIONS, device="cuda")
    for row, position in enumerate(POSITIONS):
        keys[row, :, position:] = values[row, :, position:] = torch.nan
    return Rows(q, k, v, keys, values, positions)


def exact(rows: Rows, window: int | None) -> Tensor:
    """In float64, from the cache that a call of `attend` left."""
    at = torch.arange(LENGTH, device="cuda")
    out = []
    for row, position in enumerate(POSITIONS):
        seen = at <= position
        if window is not None:
            seen &= at > position - window
        keys, values = (x[None, row][:, :, seen].double() for x in (rows.keys, rows.values))
        one = rows.q[None, row][:, :, None].double()
        out.append(F.scaled_dot_product_attention(one, keys, values, enable_gqa=True)[0, :, 0])
    return torch.stack(out)


@pytest.mark.parametrize("parts", [1, 5, 32, 64])
@pytest.mark.parametrize("window", [None, 5000])
def test_long_rows_are_those_of_float64(rows: Rows, parts: int, window: int | None) -> None:
    out = rows.attend(window, parts)
    wanted = exact(rows, window)
    places = range(len(POSITIONS)), slice(None), POSITIONS
    assert torch.equal(rows.keys[places], rows.k)
    assert torch.equal(rows.values[places], rows.v)
    for row in range(len(POSITIONS)):
        assert off(out[row], wanted[row]) < 5e-3
    assert off(rows.attend(window, 1), wanted) < 5e-3


def test_a_shared_row_is_the_same_to_the_bit_with_others_and_alone(rows: Rows) -> None:
    together = rows.attend(None, 32)
    for _ in range(20):
        assert torch.equal(rows.attend(None, 32), together)
    for row in range(len(POSITIONS)):
        alone = Rows(*(x[row : row + 1] for x in rows))
        assert torch.equal(alone.attend(None, 32)[0], together[row])


def test_a_graph_of_shared_rows_follows_positions_that_move_on(rows: Rows) -> None:
    for part in (rows.keys, rows.values):
        part.nan_to_num_()
    rows.attend(None, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Layers that follow each other: each begins before the one in front has ended.
        first = rows.attend(None, 32)
        second = rows._replace(q=first).attend(5000, 32)
    for positions in ((7,) * 8, POSITIONS, tuple(range(500, 516, 2)), (16_000,) * 8):
        rows.positions.copy_(torch.tensor(positions))
        graph.replay()
        again = rows.attend(None, 32)
        assert torch.equal(first, again)
        assert torch.equal(second, rows._replace(q=again).attend(5000, 32))


@pytest.mark.parametrize("name", ["Qwen2", "Mistral"])
async def test_an_engine_with_long_rows_samples_what_a_plain_pass_says(name: str) -> None:
    changes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    windows = {"sliding_window": 1500} if name == "Mistral" else {}
    model = family(name, **changes, **windows, max_position_embeddings=4096).bfloat16().cuda()
    asked = [
        TokenCompletionRequest(
            "tiny",
            tuple((7 * j + i) % 250 + 3 for j in range(length)),
            SamplingConfig(seed=i, max_tokens=40),
            extensions={"ignore_eos": True},
        )
        for i, length in enumerate((4000, 2040, 505, 2))
    ]
    async with LocalChatClient(
        model, tiny_tokenizer(), max_slots=4, max_context_tokens=4096
    ) as client:
        assert client._scheduler.batch.parts == {4: 8}  # type: ignore[attr-defined]
        answers = await asyncio.gather(*(client.complete_tokens(r) for r in asked))
    plain = model.float()
    for answer in answers:
        assert answer.trace is not None
        ids, n = answer.trace.token_ids, len(answer.trace.prompt_token_ids)
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([ids], device="cuda")).logits[0, n - 1 : -1]
        wanted = logits.log_softmax(-1).cpu()[torch.arange(len(ids) - n), list(ids[n:])]
        got = torch.tensor(answer.trace.completion_logprobs)
        torch.testing.assert_close(got, wanted, atol=0.03, rtol=0)
