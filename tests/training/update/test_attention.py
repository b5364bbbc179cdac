"""Attention within packed sequences: which kernel, and that it is exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.training.update import attention
from ludic.training.update.dense_attention import SequenceLengths, in_buckets, one_by_one

CPU = torch.device("cpu")


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU; nothing is computed with it here."""

    is_cuda = True


@pytest.mark.parametrize(
    ("dtype", "chosen"),
    [(torch.bfloat16, "_varlen"), (torch.float16, "_varlen"), (torch.float32, "in_buckets")],
)
def test_on_a_gpu_the_packed_kernel_is_for_the_types_that_it_computes_in(
    dtype: torch.dtype, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def kernel(name: str) -> Callable[..., torch.Tensor]:
        def call(*_: object) -> torch.Tensor:
            asked.append(name)
            return torch.zeros(1)

        return call

    for name in ("_varlen", "in_buckets", "one_by_one"):
        monkeypatch.setattr(attention, name, kernel(name))
    query = torch.zeros(1, 2, 3, 4, dtype=dtype).as_subclass(OnGpu)
    attention.packed_attention(
        nn.Identity(),
        query,
        query,
        query,
        ludic_kind="auto",
        cu_seq_lens_q=torch.tensor([0, 3]),
        max_length_q=3,
    )
    assert asked == [chosen]


def test_a_kernel_that_does_not_compute_in_the_models_type_is_refused() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"not in torch\.float32: load the model in one of them"):
        attention.packed_attention(
            nn.Identity(),
            query,
            query,
            query,
            ludic_kind="varlen",
            cu_seq_lens_q=torch.tensor([0, 3]),
            max_length_q=3,
        )


def test_under_autocast_attention_is_in_its_type_whatever_the_rotary_embedding_left() -> None:
    query = torch.randn(1, 2, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention.packed_attention(
            nn.Identity(),
            query,
            query,
            query.bfloat16(),
            ludic_kind="auto",
            cu_seq_lens_q=torch.tensor([0, 2, 5]),
            max_length_q=3,
        )
    assert found.dtype == torch.bfloat16


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], before: list[int], window: int
) -> Tensor:
    """Every query against every key, and a mask that says which may meet. A sequence's queries are
    the last of its tokens, `before` how many come before them."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    numbers = torch.arange(len(lengths))
    owner = torch.repeat_interleave(numbers, torch.tensor(lengths))
    whole = [own + shared for own, shared in zip(lengths, before, strict=True)]
    key_owner = torch.repeat_interleave(numbers, torch.tensor(whole))
    place = torch.cat([torch.arange(n - own, n) for own, n in zip(lengths, whole, strict=True)])
    key_place = torch.cat([torch.arange(n) for n in whole])
    gap = place[:, None] - key_place[None, :]
    seen = (owner[:, None] == key_owner[None, :]) & (gap >= 0)
    if window:
        seen &= gap < window
    scores = (q @ k.transpose(-1, -2)) * 0.3
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 70), st.integers(0, 40) | st.just(0)), min_size=1, max_size=7
    ),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    window=st.sampled_from([0, 1, 5, 40]),
    seed=st.integers(0, 2**32 - 1),
)
def test_in_buckets_and_one_by_one_attention_and_its_gradient_are_exact(
    sizes: list[tuple[int, int]], heads: tuple[int, int], window: int, seed: int
) -> None:
    lengths, before = [own for own, _ in sizes], [shared for _, shared in sizes]
    whole = [own + shared for own, shared in sizes]
    gen = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(1, h, n, 8, generator=gen, dtype=torch.float64)
        for h, n in ((heads[0], sum(lengths)), (heads[1], sum(whole)), (heads[1], sum(whole)))
    ]
    weights = torch.randn(1, sum(lengths), heads[0], 8, generator=gen, dtype=torch.float64)
    results = []
    for attend in (in_buckets, one_by_one, None):
        q, k, v = leaves = [t.clone().requires_grad_() for t in inputs]
        if attend is None:
            out = by_hand(q, k, v, lengths, before, window)
        else:
            out = attend(q, k, v, SequenceLengths(lengths, CPU, whole), 0.3, window)
        (out * weights).sum().backward()  # type: ignore[no-untyped-call]
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for found in results[:-1]:
        for a, b in zip(results[-1], found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [0, 1000])
def test_long_sequences_with_more_keys_than_queries_are_exact(window: int) -> None:
    lengths, before = [700, 1300, 3], [600, 0, 1200]
    whole = [own + shared for own, shared in zip(lengths, before, strict=True)]
    q, k, v = (
        torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (sum(lengths), sum(whole), sum(whole))
    )
    expected = by_hand(q, k, v, lengths, before, window)
    for attend in (in_buckets, one_by_one):
        found = attend(q, k, v, SequenceLengths(lengths, CPU, whole), 0.3, window)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_token_that_is_not_finite_stays_in_its_own_sequence() -> None:
    q = torch.randn(1, 1, 9, 4)
    q[0, 0, 2] = torch.nan
    out = in_buckets(q, q, q, SequenceLengths([3, 6], CPU), None, 0)
    assert out[0, :3].isnan().any()
    assert not out[0, 3:].isnan().any()


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [
        ([60] * 512, 1),
        ([49 + i % 16 for i in range(512)], 1),
        ([10, 20, 30, 60, 61, 100, 1000, 1010, 5], 6),
        ([1025, 1100, 1500], 3),
        ([7], 1),
    ],
)
def test_sequences_of_like_length_are_one_call(
    lengths: list[int], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = F.scaled_dot_product_attention

    def count(q: Tensor, *args: object, **kwargs: object) -> Tensor:
        asked.append(q.shape)
        return real(q, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    q = torch.randn(1, 2, sum(lengths), 4)
    in_buckets(q, q, q, SequenceLengths(lengths, CPU), None, 0)
    assert len(asked) == calls
    padded = sum(shape[0] * shape[2] for shape in asked)
    assert padded <= max(1.5 * sum(lengths), 16 * len(lengths))


def test_sequences_that_share_their_beginning_are_one_call_besides_the_first_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    real = F.scaled_dot_product_attention

    def count(q: Tensor, *args: object, **kwargs: object) -> Tensor:
        asked.append(tuple(q.shape))
        return real(q, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    lengths, whole = [72, *[12] * 15] * 4, [72] * 64
    sequences = SequenceLengths(lengths, CPU, whole)
    q, k = (torch.randn(1, 2, sum(n), 4) for n in (lengths, whole))
    in_buckets(q, k, k, sequences, None, 0)
    assert sorted(asked) == [(4, 2, 72, 4), (60, 2, 12, 4)]
