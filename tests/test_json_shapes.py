"""What is taken for ordinary is written as pydantic writes it; everything else is left to it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from datetime import date
from decimal import Decimal
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.errors import DataError, SerializationError
from ludic.plumbing.json_codec import _checked_json, from_json, to_json
from ludic.plumbing.json_shapes import shape_of
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    EnvSpec,
    FinishReason,
    Fork,
    ForkReason,
    Message,
    ProtocolSpec,
    Rollout,
    StepOutcome,
    TokenTrace,
    TruncationReason,
    VersionSpan,
)
from tests.saw.drawing import rollouts

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**80), 2**80)
rewards = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
free = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def full() -> Rollout:
    """A rollout in which every field of every type is set."""
    call: Message = {
        "role": "assistant",
        "content": "calling",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": [1]}}}
        ],
    }
    answer: Message = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"}
    trace = TokenTrace((1, 2), (3,), (-0.25,), (VersionSpan(0, 1, 4),), ((3, 5),))
    agent = AgentStep(
        0,
        ({"role": "user", "content": "?"},),
        call,
        FinishReason.STOP,
        trace,
        Fork(ForkReason.TOOLS_CHANGED, "there"),
        (answer,),
        ("late",),
        {"temperature": 1.0},
        {"deep": {"er": [None, True, 1, 0.5, "x"]}},
    )
    outcome = EnvironmentStep(
        0,
        (0,),
        "o",
        "a",
        "n",
        1.0,
        False,
        True,
        TruncationReason.MAX_STEPS,
        True,
        {"env": 1.0},
        {"k": 1},
    )
    env, protocol = EnvSpec("e", {"n": 1}), ProtocolSpec("p", {})
    return Rollout(
        "r", (agent, outcome), "me", "ep", "g", "t", "up", env, protocol, 1, 2, "no", {"m": []}
    )


@settings(max_examples=40)
@given(rollouts(), st.dictionaries(st.text(), free, max_size=3), rewards)
def test_ordinary_rollouts_are_written_without_pydantic_and_read_back_equal(
    rollout: Rollout, info: dict[str, Any], reward: float
) -> None:
    step = EnvironmentStep(9, (), "o", None, "n", reward, info=info)
    rollout = Rollout(rollout.id, (*rollout.steps, step), meta=info)
    shape = shape_of(Rollout)
    assert shape is not None
    assert shape.holds(rollout)
    again = from_json(Rollout, to_json(rollout))
    assert again == rollout
    assert repr(again.meta) == repr(rollout.meta)  # 1 and 1.0 and True are equal, 0.0 and -0.0 too


def test_the_text_is_the_one_that_pydantic_writes() -> None:
    assert to_json(full()) == _checked_json(full(), Rollout)
    assert from_json(Rollout, to_json(full())) == full()


@given(st.floats())
def test_floats_keep_every_bit(number: float) -> None:
    outcome = StepOutcome("", number)
    again = from_json(StepOutcome, to_json(outcome)).reward
    assert math.copysign(1.0, again) == math.copysign(1.0, number) or math.isnan(number)
    assert again == number or (math.isnan(number) and math.isnan(again))


class _Text(str):
    pass


class _Number(float):
    pass


class _Count(IntEnum):
    ONE = 1


class _Name(StrEnum):
    STOP = "stop"


NESTED: list[Any] = []
NESTED.append(NESTED)
JUNK: list[Any] = [
    None,
    True,
    0,
    1,
    2**70,
    0.5,
    float("nan"),
    float("-inf"),
    _Number(0.5),
    np.int64(3),
    np.float32(0.5),
    np.float64(0.5),
    Decimal("1.5"),
    "",
    "x",
    "stop",
    "agent",
    "\ud800",
    _Text("x"),
    _Count.ONE,
    _Name.STOP,
    FinishReason.LENGTH,
    b"x",
    date(2026, 1, 1),
    Path("x"),
    (),
    (1,),
    (1.5, None),
    ((1,),),
    ("x",),
    [],
    [1],
    [(1,)],
    set(),
    {1},
    {},
    {"role": "user"},
    {"role": "user", "content": "x"},
    {"role": "boss", "content": "x"},
    {"role": "user", "content": "x", "extra": 1},
    {1: 2},
    {None: 2},
    {_Text("k"): 1},
    {"a": (1,)},
    {"a": float("nan")},
    {"a": {"b": {1}}},
    {"a": NESTED},
    range(2),
    np.zeros(2),
    VersionSpan(0, 1, 2),
    EnvSpec("x"),
    object(),
]


def places(value: Any) -> Iterator[Callable[[Any], None]]:
    """A setter for each place under `value`."""
    if is_dataclass(value):
        for field in fields(value):
            yield lambda junk, n=field.name: object.__setattr__(value, n, junk)  # type: ignore[misc]
            yield from places(getattr(value, field.name))
            if isinstance(getattr(value, field.name), tuple):
                yield from _tuple_places(value, field.name)
    elif isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield lambda junk, k=key: value.__setitem__(k, junk)  # type: ignore[misc]
            yield from places(value[key])
    elif isinstance(value, tuple):
        for item in value:
            yield from places(item)


def _tuple_places(owner: Any, name: str) -> Iterator[Callable[[Any], None]]:
    for at in range(len(getattr(owner, name))):

        def put(junk: Any, at: int = at) -> None:
            items = list(getattr(owner, name))
            items[at] = junk
            object.__setattr__(owner, name, tuple(items))

        yield put


def outcome(write: Callable[..., bytes], *args: Any) -> bytes | str:
    try:
        return write(*args)
    except SerializationError as exc:
        return str(exc)


def contradicts_itself(rollout: Rollout) -> bool:
    try:
        for step in rollout.agent_steps:
            if step.trace:
                step.trace.__post_init__()
        for heard in rollout.env_steps:
            heard.__post_init__()
        rollout.__post_init__()
    except DataError:
        return True
    except (TypeError, AttributeError, ValueError):
        return False
    return False


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: type(junk).__name__)
def test_junk_in_any_place_is_written_or_refused_as_by_pydantic(junk: Any) -> None:
    count = sum(1 for _ in places(full()))
    assert count > 80
    for number in range(count):
        rollout = copy.deepcopy(full())
        list(places(rollout))[number](junk)
        if contradicts_itself(rollout):  # which only this test's way around the constructor makes
            continue
        text, expected = outcome(to_json, rollout), outcome(_checked_json, rollout, Rollout)
        if isinstance(text, bytes) and text != expected:  # 1 for 1.0, where a float is expected
            assert isinstance(expected, bytes)
            text, expected = (repr(from_json(Rollout, data)) for data in (text, expected))
        assert text == expected


@settings(max_examples=20)
@given(st.integers(90, 120))
def test_what_is_nested_too_deeply_is_refused(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    rollout = Rollout("r", (), meta={"deep": value})
    try:
        expected = _checked_json(rollout, Rollout)
    except SerializationError:
        with pytest.raises(SerializationError, match="nested more than 100 deep"):
            to_json(rollout)
    else:
        assert to_json(rollout) == expected


def test_an_annotation_that_is_not_known_has_no_shape() -> None:
    assert shape_of(complex) is None
    assert shape_of(tuple[int, str]) is None


def test_a_number_with_too_many_digits_to_be_read_is_refused() -> None:
    with pytest.raises(SerializationError, match=r"\['a'\] has too many digits"):
        to_json(Rollout("r", (), meta={"a": 10**5000}))
