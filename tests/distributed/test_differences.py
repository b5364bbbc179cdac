"""A difference gives the new weights back to the bit, and is never longer than they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ludic.distributed.differences import apply, apply_all, encode, encode_all

TYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@st.composite
def versions(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Any bits whatever, NaNs with payloads and zeros with signs among them; of these any share
    changes."""
    dtype = draw(st.sampled_from(list(TYPES)))
    shape = draw(st.sampled_from([(), (1,), (7,), (0, 3), (16, 5), (3, 1, 700), (5000,)]))
    seed, share = draw(st.integers(0, 2**32)), draw(st.sampled_from([0, 0.001, 0.05, 0.3, 1]))
    source = torch.Generator().manual_seed(seed)
    info = torch.iinfo(TYPES[dtype])

    def bits() -> Tensor:
        return torch.randint(info.min, info.max, shape, generator=source, dtype=torch.int64).to(
            TYPES[dtype]
        )

    old = bits()
    new = torch.where(torch.rand(shape, generator=source) < share, bits(), old)
    return old.view(dtype), new.view(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    kind = TYPES[one.dtype]
    return torch.equal(one.view(kind), other.view(kind))


@given(versions())
def test_applied_to_the_old_weights_it_gives_the_new_ones_to_the_bit(
    pair: tuple[Tensor, Tensor],
) -> None:
    old, new = pair
    difference = encode(old, new)
    assert difference.dtype == torch.uint8
    assert difference.numel() <= new.numel() * new.element_size()
    result = old.clone()
    apply(difference, result)
    assert same_bits(result, new)
    apply(difference, result)
    assert same_bits(result, new)


@given(versions(), st.data())
def test_bytes_that_are_no_difference_are_refused_or_change_values_alone(
    pair: tuple[Tensor, Tensor], data: st.DataObject
) -> None:
    old, new = pair
    difference = encode(old, new).clone()
    length = data.draw(st.integers(0, difference.numel()))
    difference = difference[:length]
    if length:
        place = data.draw(st.integers(0, length - 1))
        difference[place] = data.draw(st.integers(0, 255))
    result = old.clone()
    try:
        apply(difference, result)
    except ValueError:
        assert same_bits(result, old)


@pytest.mark.parametrize("dtype", TYPES)
def test_signs_of_zero_and_payloads_of_nan_are_changes(dtype: torch.dtype) -> None:
    kind = TYPES[dtype]
    old = torch.zeros(4000, dtype=dtype)
    old[7] = torch.nan
    new = old.clone()
    new[2] = -0.0
    new.view(kind)[7] += 1
    assert new[7].isnan()
    difference = encode(old, new)
    assert 0 < difference.numel() < 60
    apply(difference, old)
    assert same_bits(old, new)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25])
def test_a_changed_bfloat16_costs_three_bytes_at_most(share: float) -> None:
    source = torch.Generator().manual_seed(0)
    old = torch.randn(200_000, generator=source).bfloat16()
    changed = torch.rand(old.shape, generator=source) < share
    new = torch.where(changed, old * 2, old)
    count = int((old.view(torch.int16) != new.view(torch.int16)).sum())
    size = encode(old, new).numel()
    assert size <= 3 * count + old.numel() // 255 + 8
    assert size <= 2 * count + old.numel() // 8 + 8


def test_a_difference_that_lies_anywhere_in_memory_can_be_applied() -> None:
    old, new = torch.zeros(100), torch.zeros(100)
    new[40] = 1.0
    difference = encode(old, new)
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), difference])[3:]
    apply(moved, old)
    assert torch.equal(old, new)


def test_of_many_tensors_only_those_that_changed_are_there() -> None:
    old = {"a": torch.zeros(50, 2), "b": torch.ones(3)}
    new = {"a": torch.zeros(50, 2), "b": torch.tensor([1.0, 2.0, 1.0])}
    differences = encode_all(old, new)
    assert differences.keys() == {"b"}
    apply_all(differences, old)
    assert all(torch.equal(old[name], new[name]) for name in new)


def test_other_tensors_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'b'"):
        encode_all({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(ValueError, match="'b'"):
        apply_all({"b": torch.ones(1, dtype=torch.uint8)}, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match="became"):
        encode(torch.ones(2), torch.ones(2).half())
    with pytest.raises(ValueError, match="contiguous"):
        apply(torch.ones(1, dtype=torch.uint8), torch.ones(2, 3).t())
