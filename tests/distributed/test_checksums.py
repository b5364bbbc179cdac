"""Checksums notice every change, and are the same wherever and however they are computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.distributed.vllm import checksums as module
from ludic.distributed.vllm.checksums import (
    checksums,
    norm_is_finite,
    not_finite,
    sums_together,
)

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3)
types = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])


def checksum(tensor: torch.Tensor) -> int:
    return checksums([("", tensor)])[""]


def drawn(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


@given(shapes, types, st.integers(0, 1000), st.data())
def test_one_changed_bit_is_another_checksum(
    shape: list[int], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = drawn(shape, dtype, seed)
    changed = tensor.clone()
    raw = changed.view(-1).view(torch.uint8)
    place = data.draw(st.integers(0, raw.numel() - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(tensor) != checksum(changed)


@given(shapes, types, st.integers(0, 1000))
def test_a_copy_with_another_layout_has_the_same_checksum(
    shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    tensor = drawn(shape, dtype, seed)
    room = torch.zeros(tensor.numel() + 3, dtype=dtype)
    room[3:] = tensor.reshape(-1)
    shifted = room[3:].view(tensor.shape)
    turned = tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.ndim > 1 else tensor
    assert checksum(tensor) == checksum(shifted) == checksum(turned)


@given(st.integers(2, 40), st.integers(0, 1000), st.data())
def test_two_exchanged_values_are_noticed(size: int, seed: int, data: st.DataObject) -> None:
    tensor = drawn([size], torch.int64, seed)
    order = list(range(size))
    a, b = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    order[a], order[b] = order[b], order[a]
    exchanged = tensor[order]
    assert (checksum(tensor) == checksum(exchanged)) == torch.equal(tensor, exchanged)


def test_tensors_longer_than_a_chunk_count_every_part() -> None:
    tensor = torch.zeros((1 << 21) + 5, dtype=torch.int64)
    empty = checksum(tensor)
    for place in (0, 1 << 20, (1 << 21) + 4):
        tensor.zero_()
        tensor[place] = 1
        assert checksum(tensor) == empty + 2 * place + 1


def test_names_are_kept() -> None:
    found = checksums([("a", torch.zeros(2)), ("b", torch.ones(2))])
    assert list(found) == ["a", "b"]
    assert found["a"] != found["b"]
    assert checksums([]) == {}


def test_only_what_is_not_finite_is_named() -> None:
    pairs = [
        ("fine", torch.full((4,), 3e38)),
        ("nan", torch.tensor([0.0, float("nan")])),
        ("inf", torch.tensor([float("-inf")], dtype=torch.bfloat16)),
        ("whole", torch.arange(3)),
    ]
    assert not_finite(pairs) == ["nan", "inf"]


@given(st.integers(1, 300), st.integers(0, 1000))
def test_every_way_of_summing_gives_the_same_number(size: int, seed: int) -> None:
    tensor = drawn([size], torch.int64, seed) * (2**50 + 3)
    plain = sum(int(w) * (2 * i + 1) for i, w in enumerate(tensor.tolist()))
    assert checksum(tensor) == signed(8 * size + plain)
    assert signed(sums_together([tensor])[0]) == signed(plain)


@given(
    st.lists(st.sampled_from([0, 1, 5, 1023, 1024, 1025, 4095, 9000]), min_size=1, max_size=12),
    st.sampled_from([1024, 2048, 4096, 1 << 22]),
    st.integers(0, 1000),
)
def test_many_tensors_summed_together_have_the_sums_that_each_has_alone(
    sizes: list[int], batch: int, seed: int
) -> None:
    tensors = [drawn([n], torch.int64, seed + i) * (2**50 + 3) for i, n in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOGETHER", batch)
        found = sums_together(tensors)
    assert [signed(total + 8 * n) for total, n in zip(found, sizes, strict=True)] == [
        checksum(tensor) for tensor in tensors
    ]


@given(st.integers(0, 2), st.integers(0, 2999), st.integers(0, 63), st.integers(0, 1000))
def test_a_bit_that_changes_among_many_tensors_changes_the_sum_of_its_own(
    which: int, place: int, bit: int, seed: int
) -> None:
    tensors = [drawn([3000], torch.int64, seed + i) for i in range(3)]
    before = sums_together(tensors)
    tensors[which][place] ^= torch.tensor(1 << bit if bit < 63 else -(1 << 63))
    after = sums_together(tensors)
    assert [a == b for a, b in zip(before, after, strict=True)] == [i != which for i in range(3)]


def test_tensors_that_are_exchanged_are_noticed_by_their_names() -> None:
    first, second = drawn([3000], torch.float32, 1), drawn([3000], torch.float32, 2)
    assert checksums([("a", first), ("b", second)]) != checksums([("a", second), ("b", first)])
    rows = drawn([4, 2048], torch.float32, 3)
    assert checksum(rows) != checksum(rows[[1, 0, 2, 3]])
    words = rows.view(-1).view(torch.int64)
    assert sums_together([words]) != sums_together([words.view(4, -1)[[1, 0, 2, 3]].reshape(-1)])


def test_both_ways_of_summing_agree_over_several_chunks() -> None:
    tensor = drawn([(1 << 22) + 77], torch.int64, 1) * (2**50 + 3)
    assert signed(sums_together([tensor])[0] + 8 * tensor.numel()) == checksum(tensor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_over_everything_is_not_finite_where_one_element_is_not(
    bad: float, dtype: torch.dtype
) -> None:
    pairs = [("a", drawn([64], torch.float32, 1)), ("b", drawn([64], dtype, 2) / 50)]
    assert norm_is_finite(pairs)
    pairs[1][1][17] = bad
    assert not norm_is_finite(pairs)


def signed(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63
