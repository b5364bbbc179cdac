"""What is sent: units of work for actors, and the groups of rollouts they become.

A *unit* is the smallest piece that is asked for, sampled, taken over, trained on or dropped: the
requests of one group, or one request without a group. Its number is its place in the stream.
Token ids and log-probs travel as arrays; the rest of a rollout as JSON, which checks every field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ludic.errors import DataError, SerializationError
from ludic.pipeline.wire import SizeLimits, get_array, pack, put_array, unpack
from ludic.rollouts.requests import RolloutRequest
from ludic.rollouts.stored_prompts import StoredRollout, with_repeats, without_repeats
from ludic.types import AgentStep, Rollout, Step, TokenTrace, VersionSpan, from_json, to_json


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of work, by number. `prefix` begins the ids of its episodes; `max_steps` bounds
    them. An actor that loads policies itself begins it with that of serial number `policy`, or a
    newer one."""

    number: int
    requests: tuple[RolloutRequest, ...]
    prefix: str
    max_steps: int
    policy: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """What became of a unit: its rollouts, or why an actor refused it."""

    number: int
    rollouts: tuple[Rollout, ...]
    actor: str = ""
    refused: str | None = None


def unit_message(unit: Unit) -> bytes:
    return pack(
        "unit",
        {
            "number": unit.number,
            "requests": [to_json(request).decode() for request in unit.requests],
            "prefix": unit.prefix,
            "max_steps": unit.max_steps,
            "policy": unit.policy,
        },
    )


def read_unit(message: bytes, limits: SizeLimits | None = None) -> Unit:
    """Raises `SerializationError` for what is no unit."""
    match unpack("unit", message, limits):
        case {
            "number": int(number),
            "requests": list(requests),
            "prefix": str(prefix),
            "max_steps": int(max_steps),
            "policy": int(policy),
        } if requests and all(isinstance(r, str) for r in requests):
            made = tuple(from_json(RolloutRequest, request) for request in requests)
            return Unit(number, made, prefix, max_steps, policy)
    raise SerializationError("not a unit of work")


def group_message(group: Group, limits: SizeLimits | None = None) -> bytes:
    return pack(
        "group",
        {
            "number": group.number,
            "actor": group.actor,
            "refused": group.refused,
            "rollouts": [_put_rollout(rollout) for rollout in group.rollouts],
        },
        limits,
    )


def read_group(message: bytes, limits: SizeLimits | None = None) -> Group:
    """Raises `SerializationError` for what is no group."""
    match unpack("group", message, limits):
        case {
            "number": int(number),
            "actor": str(actor),
            "refused": None | str() as refused,
            "rollouts": list(rollouts),
        }:
            try:
                return Group(number, tuple(map(_get_rollout, rollouts)), actor, refused)
            except (DataError, ValueError, TypeError, OverflowError) as exc:
                raise SerializationError(f"group {number}: {exc}") from exc
    raise SerializationError("not a group of rollouts")


def _put_rollout(rollout: Rollout) -> dict[str, Any]:
    stored = without_repeats(rollout)
    traces: list[dict[str, Any] | None] = []
    steps: list[Step] = []
    for step in stored.rollout.steps:
        if isinstance(step, AgentStep):
            traces.append(None if step.trace is None else _put_trace(step.trace))
            steps.append(replace(step, trace=None))
        else:
            steps.append(step)
    bare = stored.rollout.labelled(steps=tuple(steps))
    return {
        "rollout": to_json(bare).decode(),
        "traces": traces,
        "shared": put_array(np.array(stored.shared, dtype=np.int64)),
    }


def _get_rollout(data: Any) -> Rollout:
    match data:
        case {"rollout": str(text), "traces": list(traces), "shared": list(shared)}:
            bare = from_json(Rollout, text)
        case _:
            raise SerializationError("not a rollout of a group")
    following = iter(traces)
    steps = tuple(
        replace(step, trace=_get_trace(next(following, None)))
        if isinstance(step, AgentStep)
        else step
        for step in bare.steps
    )
    if len(traces) != len(bare.agent_steps):
        raise SerializationError(f"rollout {bare.id!r}: {len(traces)} traces for its model calls")
    counts = tuple(get_array(shared).tolist())
    return with_repeats(StoredRollout(bare.labelled(steps=steps), counts))


def _put_trace(trace: TokenTrace) -> dict[str, Any]:
    kept = trace.kept_token_ids
    logprobs = trace.completion_logprobs
    spans = [(s.start, s.end, s.version, s.attempt) for s in trace.version_spans]
    return {
        "prompt": put_array(_ids(trace.prompt_token_ids)),
        "completion": put_array(_ids(trace.completion_token_ids)),
        "logprobs": None if logprobs is None else put_array(_floats(logprobs)),
        "spans": put_array(np.array(spans, dtype=np.int64).reshape(-1)),
        "kept": None
        if kept is None
        else [
            put_array(np.array([len(ids) for ids in kept], dtype=np.int64)),
            put_array(_ids([i for ids in kept for i in ids])),
        ],
    }


def _get_trace(data: Any) -> TokenTrace | None:
    if data is None:
        return None
    match data:
        case {
            "prompt": prompt,
            "completion": completion,
            "logprobs": logprobs,
            "spans": spans,
            "kept": kept,
        }:
            return TokenTrace(
                tuple(get_array(prompt).tolist()),
                tuple(get_array(completion).tolist()),
                None if logprobs is None else tuple(get_array(logprobs).tolist()),
                tuple(VersionSpan(*row) for row in get_array(spans).reshape(-1, 4).tolist()),
                None if kept is None else _get_kept(kept),
            )
    raise SerializationError("not the trace of a model call")


def _get_kept(kept: Any) -> tuple[tuple[int, ...], ...]:
    match kept:
        case [lengths, ids]:
            arrays = get_array(lengths), get_array(ids)
            counts, flat = (array.tolist() for array in arrays)
            whole = all(array.dtype.kind == "i" and (array >= 0).all() for array in arrays)
            if whole and sum(counts) == len(flat):
                return tuple(tuple(flat[a:b]) for a, b in pairwise((0, *accumulate(counts))))
    raise SerializationError("the kept ids of a model call are no ids, or do not add up")


def _ids(values: Sequence[int]) -> NDArray[Any]:
    ids = np.array(values, dtype=np.int64)
    small = ids.astype(np.int32)
    return small if np.array_equal(small, ids) else ids


def _floats(values: Sequence[float]) -> NDArray[Any]:
    """In half the room where nothing is lost by it, which is the rule: log-probs are float32."""
    exact = np.array(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        small = exact.astype(np.float32)
    same = small.astype(np.float64).tobytes() == exact.tobytes()
    return small if same else exact
