"""Records are frozen, cheap to copy, and JSON either keeps them exactly or refuses them."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import force_setattr, replace

from ludic.errors import DataError, SerializationError
from ludic.plumbing.records import Record, changed, from_json, to_json
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
from tests.test_types import exactly

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


class Point(Record, frozen=True):
    """A record with a check."""

    x: int
    y: tuple[int, ...] = ()
    info: dict[str, int] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")


class Longer(Point, frozen=True):
    """A user's own record, with one field more."""

    z: int = 5


def test_a_record_is_frozen_compares_by_value_and_survives_copying_and_pickle() -> None:
    one = Point(1, (2,), {"a": 3})
    for again in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert again == one
    with pytest.raises(AttributeError, match="immutable"):
        one.x = 2  # type: ignore[misc]
    assert hash(VersionSpan(0, 1, 2)) == hash(VersionSpan(0, 1, 2))
    assert Point(1).info is not Point(1).info


def test_a_changed_copy_is_checked_by_replace_and_vouched_for_by_changed() -> None:
    one = Longer(1, z=7)
    assert replace(one, x=2) == changed(one, x=2) == Longer(2, z=7)
    assert one.x == 1
    with pytest.raises(ValueError, match="negative"):
        replace(one, x=-1)
    assert changed(one, x=-1).x == -1
    for change in (replace, changed):
        with pytest.raises((TypeError, AttributeError), match="colour"):
            change(one, colour="red")


def test_a_derived_record_is_written_and_read_with_its_own_fields() -> None:
    assert from_json(Longer, to_json(Longer(1, z=7))) == Longer(1, z=7)


@settings(max_examples=25)
@given(rollouts(), st.dictionaries(st.text(), free, max_size=3), rewards)
def test_ordinary_rollouts_read_back_equal_to_the_type(
    rollout: Rollout, info: dict[str, Any], reward: float
) -> None:
    step = EnvironmentStep(9, (), "o", None, "n", reward, info=info)
    rollout = Rollout(rollout.id, (*rollout.steps, step), meta=info)
    again = from_json(Rollout, to_json(rollout))
    assert again == rollout
    assert repr(again.meta) == repr(rollout.meta)  # 1 and 1.0 and True are equal, 0.0 and -0.0 too


def test_a_rollout_is_written_as_earlier_versions_read_it() -> None:
    """The same JSON: which key comes first means nothing."""
    data = json.loads(to_json(full()))
    assert list(data) == list(Rollout.__struct_fields__)
    agent, outcome = data["steps"]
    assert (agent.pop("kind"), outcome.pop("kind")) == ("agent", "environment")
    assert list(agent) == list(AgentStep.__struct_fields__)
    assert list(outcome) == list(EnvironmentStep.__struct_fields__)
    assert agent["trace"]["version_spans"] == [{"start": 0, "end": 1, "version": 4, "attempt": 0}]
    assert agent["finish_reason"] == "stop"


def test_the_kind_of_a_step_may_stand_anywhere() -> None:
    step = EnvironmentStep(0, (), "", None, "", 1.0)
    data = json.loads(to_json(step))
    data["kind"] = data.pop("kind")  # last, as earlier versions wrote it
    assert from_json(Rollout, json.dumps({"id": "r", "steps": [data]})).steps == (step,)


@given(st.floats())
def test_floats_keep_every_bit(number: float) -> None:
    outcome = StepOutcome("", number)
    again = from_json(StepOutcome, to_json(outcome)).reward
    assert math.copysign(1.0, again) == math.copysign(1.0, number) or math.isnan(number)
    assert again == number or (math.isnan(number) and math.isnan(again))


def test_nan_and_the_infinities_are_written_as_python_writes_them() -> None:
    values = {"a": [float("nan"), float("inf")], "b": -float("inf")}
    text = to_json(EnvSpec("x", values))
    assert text == b'{"kind":"x","kwargs":{"a":[NaN,Infinity],"b":-Infinity}}'
    assert repr(from_json(EnvSpec, text)) == repr(EnvSpec("x", values))
    assert repr(json.loads(text)["kwargs"]) == repr(values)


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
    if isinstance(value, Record):
        for name in value.__struct_fields__:
            yield lambda junk, n=name: force_setattr(value, n, junk)  # type: ignore[misc]
            yield from places(getattr(value, name))
            if isinstance(getattr(value, name), tuple):
                yield from _tuple_places(value, name)
    elif isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield lambda junk, k=key: value.__setitem__(k, junk)  # type: ignore[misc]
            yield from places(value[key])
    elif isinstance(value, tuple):
        for item in value:
            yield from places(item)


def _tuple_places(owner: Record, name: str) -> Iterator[Callable[[Any], None]]:
    for at in range(len(getattr(owner, name))):

        def put(junk: Any, at: int = at) -> None:
            items = list(getattr(owner, name))
            items[at] = junk
            force_setattr(owner, name, tuple(items))

        yield put


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


def _plain(value: Any) -> Any:
    """A value as it may be read back: numbers and text of a subclass as what they are."""
    if isinstance(value, Record):
        return type(value), [_plain(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [_plain(item) for item in value]
    for kind in (bool, str, float, int):
        if isinstance(value, kind):
            return "nan" if value != value else kind(value)
    return value


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: type(junk).__name__)
def test_junk_in_any_place_is_kept_exactly_or_refused(junk: Any) -> None:
    count = sum(1 for _ in places(full()))
    assert count > 80
    for number in range(count):
        rollout = copy.deepcopy(full())
        list(places(rollout))[number](junk)
        if contradicts_itself(rollout):  # which only this test's way around the constructor makes
            continue
        try:
            text = to_json(rollout)
        except SerializationError:
            with pytest.raises(SerializationError, match="cannot write Rollout"):
                to_json(rollout)
        else:
            assert _plain(from_json(Rollout, text)) == _plain(rollout)


@pytest.mark.parametrize(
    ("record", "place"),
    [
        (Rollout("r", (), group_id=5), r"Rollout\.group_id: Expected"),  # type: ignore[arg-type]
        (Rollout("r", [], meta={}), r"Rollout\.steps: list"),  # type: ignore[arg-type]
        (EnvSpec("x", {"a": {"b": [np.int64(1)]}}), r"EnvSpec\.kwargs\['a'\]\['b'\]\[0\]: int64"),
        (EnvSpec("x", {"a": {2: 1}}), r"EnvSpec\.kwargs\['a'\]: the key int 2"),
        (
            Rollout("r", (AgentStep(0, (), {"role": "user"}, FinishReason.STOP),)),  # type: ignore[typeddict-item]
            r"Rollout\.steps\[0\]\.message: .*`content`",
        ),
    ],
)
def test_what_would_be_lost_is_named_by_its_place(record: Record, place: str) -> None:
    with pytest.raises(SerializationError, match=place):
        to_json(record)


def test_a_key_that_messages_do_not_have_is_refused_and_not_dropped() -> None:
    message: Any = {"role": "user", "content": "x", "mood": "cheerful"}
    with pytest.raises(SerializationError, match=r"message: the key str 'mood'"):
        to_json(AgentStep(0, (), message, FinishReason.STOP))


@pytest.mark.parametrize("depth", [50, 100_000])
def test_what_is_nested_too_deeply_is_refused(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    rollout = Rollout("r", (), meta={"deep": value})
    if depth == 50:
        assert exactly(from_json(Rollout, to_json(rollout))) == exactly(rollout)
        return
    with pytest.raises(SerializationError, match="nested too deeply"):
        to_json(rollout)


def test_a_number_with_too_many_digits_to_be_read_is_refused() -> None:
    with pytest.raises(SerializationError, match="digits"):
        to_json(Rollout("r", (), meta={"a": 10**5000}))


@pytest.mark.parametrize("number", ["1", "NaN"])
def test_half_a_surrogate_pair_is_refused_however_it_is_spelled(number: str) -> None:
    with pytest.raises(SerializationError, match="Invalid JSON"):
        from_json(EnvSpec, r'{"kind": "\ud800", "kwargs": {"a": ' + number + "}}")


AT_ONCE = """
import sys, threading, typing
import msgspec
from ludic.plumbing.records import ready, to_json
sys.setswitchinterval(1e-6)

def at_once(use, *args):
    start = threading.Barrier(6)
    threads = [threading.Thread(target=lambda: (start.wait(), use(*args))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

def read(data, record):
    msgspec.msgpack.decode(data, type=ready(record))

a, b = ([f"{letter}{i}" for i in range(30)] for letter in "ab")
for _ in range(150):
    inner = typing.TypedDict("Inner", dict.fromkeys(b, str))
    outer = typing.TypedDict("Outer", {**dict.fromkeys(a, str), "inner": inner})
    at_once(to_json, {**dict.fromkeys(a, "x"), "inner": dict.fromkeys(b, "y")}, outer)
    part = msgspec.defstruct("Part", [(name, str) for name in b])
    record = msgspec.defstruct("Whole", [*((name, str) for name in a), ("parts", list[part])])
    at_once(read, msgspec.msgpack.encode(record(*a, [part(*b)])), record)
"""


def test_threads_that_use_a_type_for_the_first_time_do_not_end_the_process() -> None:
    subprocess.run([sys.executable, "-c", AT_ONCE], check=True, timeout=120)
