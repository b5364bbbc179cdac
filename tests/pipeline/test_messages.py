"""Messages come back as they were sent, or are refused; nothing large is ever unpacked."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import SchemaVersionError, SerializationError
from ludic.pipeline import messages
from ludic.pipeline.messages import (
    Group,
    Unit,
    group_message,
    pack,
    read_group,
    read_unit,
    unit_message,
    unpack,
)
from ludic.rollouts import RolloutRequest
from ludic.saw.building import batch_from_rollouts
from ludic.saw.codec import batch_to_dict
from ludic.training import MonteCarloReturn
from ludic.types import (
    AgentStep,
    EnvSpec,
    FinishReason,
    Message,
    ProtocolSpec,
    Rollout,
    TokenTrace,
    VersionSpan,
)
from tests.saw import drawing
from tests.test_types import ROLLOUTS

BODIES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)

SAID: Message = {"role": "assistant", "content": "x"}


def sampled(**trace: Any) -> Rollout:
    step = AgentStep(0, (), SAID, FinishReason.STOP, TokenTrace((1, 2), (3, 4), **trace))
    return Rollout(id="r", steps=(step,))


@given(BODIES)
def test_a_body_comes_back_as_it_was_packed(body: Any) -> None:
    assert unpack("unit", pack("unit", body)) == body


@given(st.lists(ROLLOUTS, max_size=3))
def test_a_group_comes_back_to_the_bit(rollouts: list[Rollout]) -> None:
    group = Group(7, tuple(rollouts), "actor-1")
    back = read_group(group_message(group))
    # As text: NaN is not equal to itself, but its text is.
    assert repr(back) == repr(group)


@given(st.tuples(drawing.rollouts("a"), drawing.rollouts("b")))
def test_a_batch_is_the_same_to_the_bit_whether_its_rollouts_were_sent_or_not(
    members: tuple[Rollout, ...],
) -> None:
    sent = read_group(group_message(Group(0, members))).rollouts
    batches = (batch_from_rollouts(rollouts, MonteCarloReturn()) for rollouts in (members, sent))
    # As text, in which every float32 is exact.
    ours, theirs = map(repr, map(batch_to_dict, batches))
    assert ours == theirs


@pytest.mark.parametrize("logprob", [-0.0, -1e-45, -0.1, -1e300, -7])
def test_a_log_prob_keeps_its_bits_in_four_bytes_or_eight(logprob: float) -> None:
    rollout = sampled(completion_logprobs=(logprob, -0.5))
    (back,) = read_group(group_message(Group(0, (rollout,)))).rollouts
    trace = back.agent_steps[0].trace
    assert trace is not None
    assert trace.completion_logprobs is not None
    assert repr(trace.completion_logprobs) == repr((float(logprob), -0.5))


@pytest.mark.parametrize("ids", [(1, 2), (2**40, 0), ()])
def test_ids_and_log_probs_keep_every_bit(ids: tuple[int, ...]) -> None:
    values = tuple(0.1 * i for i in ids)
    trace = TokenTrace(
        ids, ids, values, (VersionSpan(0, len(ids), 3, 2),), tuple((i,) for i in ids)
    )
    rollout = Rollout(id="r", steps=(AgentStep(0, (), SAID, FinishReason.STOP, trace),))
    assert read_group(group_message(Group(0, (rollout,)))).rollouts == (rollout,)


def test_a_unit_comes_back_with_its_requests() -> None:
    request = RolloutRequest(
        EnvSpec("tic_tac_toe", {"mark": "X"}), ProtocolSpec("single_agent"), 1, 2, group_id="g"
    )
    unit = Unit(12, (request, request), "unit-12", 6)
    assert read_unit(unit_message(unit)) == unit


def test_the_requests_of_a_unit_share_what_they_have_alike_and_nothing_else() -> None:
    values: list[Any] = [1, 1, 1.0, True, None, float("nan")]
    requests = tuple(
        RolloutRequest(EnvSpec("e", {"x": value}), ProtocolSpec("p", {}), sampling_seed=seed)
        for seed, value in enumerate(values)
    )
    read = read_unit(unit_message(Unit(0, requests, "unit-0", 1))).requests
    assert read[0].env is read[1].env
    assert len({id(request.protocol) for request in read}) == 1
    assert [repr(request) for request in read] == [repr(request) for request in requests]


@given(st.data())
def test_no_change_of_a_byte_goes_unnoticed(data: st.DataObject) -> None:
    message = bytearray(group_message(Group(1, (sampled(completion_logprobs=(-1.0, -2.0)),))))
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SerializationError):
        read_group(bytes(message))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(SerializationError):
        read_group(noise)


@given(BODIES)
def test_a_body_that_is_no_group_is_refused(body: Any) -> None:
    with pytest.raises(SerializationError):
        read_group(pack("group", body))


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(SerializationError, match="kind 'unit' where a group belongs"):
        unpack("group", pack("unit", 1))


@pytest.mark.parametrize("fields", [5, 9])
def test_a_newer_schema_says_what_to_do(fields: int) -> None:
    newer = msgspec.msgpack.encode(
        [messages.SCHEMA + 1, "group", 1, b"", b"", *([0] * (fields - 5))]
    )
    with pytest.raises(SchemaVersionError, match="same version for actors and trainer"):
        read_group(newer)


def test_a_message_over_the_limit_is_refused_before_it_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(SerializationError, match="over the limit of 100"):
        unpack("unit", b"\x00" * 101)


def test_a_small_message_with_a_huge_body_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bomb = pack("unit", b"\x00" * 10**7)
    assert len(bomb) < 2000
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 10**6)
    with pytest.raises(SerializationError, match="over the limit of 1,000,000"):
        unpack("unit", bomb)


@pytest.mark.parametrize("with_size", [True, False])
def test_a_body_that_lies_about_its_size_is_refused(with_size: bool) -> None:
    packed = zstandard.ZstdCompressor(write_content_size=with_size).compress(b"\x00" * 10**7)
    lie = msgspec.msgpack.encode(
        [messages.SCHEMA, "unit", 10, messages._checksum("unit", packed), packed]
    )
    with pytest.raises(SerializationError, match="damaged"):
        unpack("unit", lie)


def test_what_is_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 1000)
    noise = np.random.default_rng(0).bytes(2000)
    with pytest.raises(SerializationError, match="over the limit"):
        pack("unit", noise)
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 1000)
    with pytest.raises(SerializationError, match="over the limit"):
        pack("unit", b"\x00" * 2000)


def test_arrays_are_packed_small() -> None:
    """Ids of a vocabulary take less than four bytes each, their log-probs about four."""
    noise = np.random.default_rng(0)
    n = 4000
    ids = tuple(noise.integers(0, 150_000, n).tolist())
    logprobs = tuple((-noise.exponential(size=n)).astype(np.float32).tolist())
    trace = TokenTrace((1,), ids, logprobs, (VersionSpan(0, n, 1),))
    rollout = Rollout(id="r", steps=(AgentStep(0, (), SAID, FinishReason.STOP, trace),))
    assert len(group_message(Group(0, (rollout,)))) < 8 * n
