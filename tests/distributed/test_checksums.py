"""Checksums notice every change, and are the same wherever and however they are computed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.distributed.checksums import _sum_on_gpu, checksum, checksums, not_finite

shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3)
types = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])


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
    assert int(checksum(tensor)) != int(checksum(changed))


@given(shapes, types, st.integers(0, 1000))
def test_a_copy_with_another_layout_has_the_same_checksum(
    shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    tensor = drawn(shape, dtype, seed)
    room = torch.zeros(tensor.numel() + 3, dtype=dtype)
    room[3:] = tensor.reshape(-1)
    shifted = room[3:].view(tensor.shape)
    turned = tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.ndim > 1 else tensor
    assert int(checksum(tensor)) == int(checksum(shifted)) == int(checksum(turned))


@given(st.integers(2, 40), st.integers(0, 1000))
def test_exchanged_values_are_noticed(size: int, seed: int) -> None:
    tensor = drawn([size], torch.int64, seed)
    turned = tensor.roll(1)
    if not torch.equal(tensor, turned):
        assert int(checksum(tensor)) != int(checksum(turned))


def test_tensors_longer_than_a_chunk_count_every_part() -> None:
    tensor = torch.zeros((1 << 21) + 5, dtype=torch.int64)
    empty = int(checksum(tensor))
    for place in (0, 1 << 20, (1 << 21) + 4):
        tensor.zero_()
        tensor[place] = 1
        assert int(checksum(tensor)) == empty + 2 * place + 1


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
    plain = 8 * size + sum(int(w) * (2 * i + 1) for i, w in enumerate(tensor.tolist()))
    assert int(checksum(tensor)) == (plain + 2**63) % 2**64 - 2**63
    assert int(_sum_on_gpu(tensor, 8 * size)) == int(checksum(tensor))


def test_both_ways_of_summing_agree_over_several_chunks() -> None:
    tensor = drawn([(1 << 20) + 77], torch.int64, 1) * (2**50 + 3)
    assert int(_sum_on_gpu(tensor, 8 * tensor.numel())) == int(checksum(tensor))
