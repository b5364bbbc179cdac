"""Traces that no sampler can have made, in a group that came from an actor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ludic.errors import SerializationError
from ludic.pipeline.messages import Group, group_message, pack, read_group, unpack
from ludic.types import AgentStep, FinishReason, Rollout, TokenTrace


def array(values: Any) -> list[Any]:
    """As it travels."""
    return [values.dtype.str, values.tobytes()]


def group() -> bytes:
    trace = TokenTrace((1, 2), (3,), (-0.5,))
    step = AgentStep(0, (), {"role": "assistant", "content": "x"}, FinishReason.STOP, trace)
    return group_message(Group(1, (Rollout("r", (step,)),), "actor", None))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt", np.array([1.0, 2.5])),
        ("prompt", np.array([1, -2])),
        ("completion", np.array([3.0])),
        ("completion", np.array([-1])),
        ("logprobs", np.array([np.nan])),
        ("logprobs", np.array([-np.inf])),
    ],
)
def test_ids_and_log_probs_that_cannot_be_are_refused(field: str, values: Any) -> None:
    body = unpack("group", group())
    body["rollouts"][0]["traces"][0][field] = array(values)
    with pytest.raises(SerializationError, match="group 1: TokenTrace"):
        read_group(pack("group", body))


@pytest.mark.parametrize(
    ("lengths", "ids"), [([1.0], [3]), ([-1], []), ([1], [3.0]), ([1], [-3]), ([2], [3])]
)
def test_kept_ids_that_cannot_be_are_refused(lengths: list[Any], ids: list[Any]) -> None:
    body = unpack("group", group())
    trace = body["rollouts"][0]["traces"][0]
    trace["kept"] = [
        array(np.array(lengths)),
        array(np.array(ids, dtype=np.array(ids or [0]).dtype)),
    ]
    with pytest.raises(SerializationError, match="kept ids"):
        read_group(pack("group", body))


@pytest.mark.parametrize(
    "wrong", [["|O", b""], ["<i4", b"abc"], ["<i4", "text"], ["<u1", b"a"], ["<i4"], [], None]
)
def test_what_is_no_array_of_numbers_is_refused(wrong: Any) -> None:
    body = unpack("group", group())
    body["rollouts"][0]["traces"][0]["prompt"] = wrong
    with pytest.raises(SerializationError):
        read_group(pack("group", body))
