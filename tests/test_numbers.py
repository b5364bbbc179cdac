"""Numbers in an array read as the tuple of them does, wherever a record holds them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from operator import add
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ludic.errors import DataError
from ludic.plumbing.records import Numbers
from ludic.types import TokenTrace, VersionSpan, from_json, to_json

ids = st.lists(st.integers(0, 2**62), max_size=6).map(tuple)
logprobs = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=6).map(tuple)


def numbers(values: Sequence[float], dtype: Any = np.int64) -> Any:
    return Numbers(np.array(values, dtype))


@given(ids, ids, st.integers(-7, 7), st.integers(-7, 7))
def test_they_do_what_the_tuple_does(
    these: tuple[int, ...], those: tuple[int, ...], start: int, end: int
) -> None:
    ours = numbers(these)
    assert (len(ours), list(ours), bool(ours)) == (len(these), list(these), bool(these))
    assert (repr(ours), hash(ours)) == (repr(these), hash(these))
    assert ours == these == ours
    assert (ours == numbers(those)) == (ours == those) == (those == ours) == (these == those)
    assert ours[start:end] == numbers(these[start:end]) == these[start:end]
    for joined in (ours + numbers(those), ours + those, these + numbers(those)):
        assert joined == these + those
    assert all(type(one) is int for one in ours)
    if these:
        assert ours[-1] == these[-1]
        assert type(ours[0]) is int
    assert pickle.loads(pickle.dumps(ours)) == ours


def test_neither_lists_nor_other_things_are_equal_to_them() -> None:
    assert numbers([1, 2]) != [1, 2]
    assert numbers([1]) != 1
    with pytest.raises(TypeError):
        add(numbers([1]), [2])


@given(ids, logprobs, st.booleans())
def test_a_trace_of_them_is_the_trace_of_tuples(
    prompt: tuple[int, ...], sampled: tuple[float, ...], versioned: bool
) -> None:
    spans = (VersionSpan(0, len(sampled), 3),) if versioned else ()
    completion = tuple(range(len(sampled)))
    plain = TokenTrace(prompt, completion, sampled, spans)
    trace = TokenTrace(*(numbers(prompt), numbers(completion), numbers(sampled, np.float64), spans))
    assert (trace, repr(trace), hash(trace)) == (plain, repr(plain), hash(plain))
    assert to_json(trace) == to_json(plain)
    assert repr(from_json(TokenTrace, to_json(trace))) == repr(plain)
    longer = replace(trace, prompt_token_ids=trace.token_ids + numbers([9]))
    assert longer.extends(trace)
    assert longer.extends(plain)
    assert not trace.extends(longer)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("completion_token_ids", numbers([1, 2, 3])),
        ("completion_logprobs", numbers([-1.0], np.float32)),
        ("prompt_token_ids", numbers([1.0], np.float32)),
        ("version_spans", (VersionSpan(0, 1, 3),)),
    ],
)
def test_a_trace_of_them_is_checked_like_any_other(field: str, values: Any) -> None:
    logs = cast(Any, numbers([-0.5, -0.25], np.float32))
    trace = TokenTrace(numbers([1]), numbers([2, 3]), logs)
    with pytest.raises(DataError, match="TokenTrace"):
        replace(trace, **{field: values})
