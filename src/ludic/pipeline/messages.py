"""What is sent over Redis: units of work for actors, and the groups of rollouts they become.

A *unit* is the smallest piece that is asked for, sampled, taken over, trained on or dropped: the
requests of one group, or one request without a group. Its number is its place in the stream.

Every message is an envelope: msgpack with a schema number, a checksum and a compressed body. Sizes
are checked before a body is decompressed, while it is, and after; then msgspec reads it by the
types below. Token ids and log-probs travel as arrays, the rest of a rollout as JSON, whose fields
are checked like those of a file. Nothing is unpickled and nothing is executed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import zstandard
from msgspec.structs import force_setattr
from numpy.typing import NDArray

from ludic.errors import DataError, SchemaVersionError, SerializationError
from ludic.plumbing.records import Numbers, changed, encode, ready
from ludic.rollouts.requests import RolloutRequest
from ludic.rollouts.storage import whole_prompts, without_repeats
from ludic.rollouts.storage import with_traces as with_traces
from ludic.types import Rollout, TokenTrace, VersionSpan, are_ids, from_json, to_json

SCHEMA = 1
"""The version of the messages' layout; a message of a newer one is refused."""

MAX_MESSAGE_BYTES, MAX_BODY_BYTES = 64 * 2**20, 256 * 2**20
"""The largest message, as it travels and after decompression."""
_NOT_MSGPACK = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of work, by number. `prefix` begins the ids of its episodes; `max_steps` bounds
    them. An actor begins it with the policy of serial number `policy`, or a newer one, and not
    before there is `version` of `attempt`, which may still be on its way, or a newer attempt."""

    number: int
    requests: tuple[RolloutRequest, ...]
    prefix: str
    max_steps: int
    policy: int = 0
    attempt: int = 0
    version: int = 0


class Times(msgspec.Struct, array_like=True, frozen=True):
    """An actor's seconds with a unit: until the unit's policy was there, and until all its episodes
    had ended; and how long that policy took to load, once the actor had heard of it."""

    waited_s: float = 0.0
    sampled_s: float = 0.0
    loaded_s: float = 0.0


NO_TIMES = Times()


@dataclass(frozen=True, slots=True)
class Group:
    """What became of a unit: its rollouts, or why an actor refused it."""

    number: int
    rollouts: tuple[Rollout, ...]
    actor: str = ""
    refused: str | None = None
    times: Times = NO_TIMES


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    schema: int
    kind: str
    size: int
    checksum: bytes
    body: bytes


_Dtype: TypeAlias = Literal["<i4", "<i8", "<f4", "<f8"]


class _Array(msgspec.Struct, array_like=True, frozen=True):
    dtype: _Dtype
    data: bytes


class _Trace(msgspec.Struct, frozen=True):
    prompt: _Array
    completion: _Array
    logprobs: _Array | None
    spans: _Array
    kept: tuple[_Array, _Array] | None


class _Rollout(msgspec.Struct, frozen=True):
    rollout: str
    traces: list[_Trace | None]
    shared: _Array


class _Unit(msgspec.Struct, frozen=True):
    number: int
    requests: list[str]
    prefix: str
    max_steps: int
    policy: int
    attempt: int = 0
    version: int = 0


class _Group(msgspec.Struct, frozen=True, omit_defaults=True):
    number: int
    actor: str
    refused: str | None
    rollouts: list[_Rollout]
    times: Times = NO_TIMES


def unit_message(unit: Unit) -> bytes:
    requests = [to_json(request).decode() for request in unit.requests]
    needs = (unit.policy, unit.attempt, unit.version)
    return pack("unit", _Unit(unit.number, requests, unit.prefix, unit.max_steps, *needs))


def read_unit(message: bytes) -> Unit:
    """Raises `SerializationError` for what is no unit."""
    body: _Unit = unpack("unit", message, cls=_Unit)
    if not body.requests:
        raise SerializationError("a unit of work without requests")
    requests = _sharing(from_json(RolloutRequest, request) for request in body.requests)
    needs = (body.policy, body.attempt, body.version)
    return Unit(body.number, requests, body.prefix, body.max_steps, *needs)


def _sharing(requests: Iterable[RolloutRequest]) -> tuple[RolloutRequest, ...]:
    """The same requests; what they have in common is one object, as it was for the sender. The
    engine looks up once for each object what to make an episode with."""
    parts: dict[tuple[type, bytes], Any] = {}

    def first(part: Any) -> Any:
        same = parts.setdefault((type(part), encode(part)), part)
        return same if same == part else part  # as JSON, NaN is None

    return tuple(
        changed(r, env=first(r.env), protocol=first(r.protocol), inference=first(r.inference))
        for r in requests
    )


def group_message(group: Group) -> bytes:
    rollouts = [_put_rollout(rollout) for rollout in group.rollouts]
    return pack("group", _Group(group.number, group.actor, group.refused, rollouts, group.times))


def read_group(message: bytes) -> Group:
    """Raises `SerializationError` for what is no group."""
    body: _Group = unpack("group", message, cls=_Group)
    try:
        rollouts = _get_rollouts(body.rollouts)
    except (DataError, ValueError, TypeError, OverflowError) as exc:
        raise SerializationError(f"group {body.number}: {exc}") from exc
    return Group(body.number, rollouts, body.actor, body.refused, body.times)


def _put_rollout(rollout: Rollout) -> _Rollout:
    stored = without_repeats(rollout)
    traces = [call.trace for call in stored.rollout.agent_steps]
    return _Rollout(
        to_json(with_traces(stored.rollout, lambda _: None)).decode(),
        [None if trace is None else _put_trace(trace) for trace in traces],
        _put("<i8", stored.shared),
    )


def _get_rollouts(sent: Sequence[_Rollout]) -> tuple[Rollout, ...]:
    """A group's rollouts. The numbers of all its traces are checked at once, and stay arrays; where
    one of them cannot be, a `TokenTrace` of tuples says which."""
    traces = [trace for rollout in sent for trace in rollout.traces if trace is not None]
    ids = _all_of([part for trace in traces for part in (trace.prompt, trace.completion)])
    logprobs = _all_of([trace.logprobs for trace in traces if trace.logprobs is not None])
    sound = all(part.dtype.kind == "i" and part.min(initial=0) >= 0 for part in ids) and all(
        part.dtype.kind == "f" and np.isfinite(part).all() for part in logprobs
    )
    read: Any = Numbers if sound else _plain
    return tuple([_get_rollout(data, read) for data in sent])


def _get_rollout(data: _Rollout, read: Callable[[NDArray[Any]], tuple[Any, ...]]) -> Rollout:
    rollout = from_json(Rollout, data.rollout)
    calls = rollout.agent_steps
    if len(data.traces) != len(calls):
        raise SerializationError(f"rollout {rollout.id!r}: {len(data.traces)} traces for its calls")
    parts = [(read(_get(t.prompt)), read(_get(t.completion))) for t in data.traces if t is not None]
    prompts = iter(whole_prompts(parts, _plain(_get(data.shared))))
    for call, trace in zip(calls, data.traces, strict=True):
        # In place of a copy: nobody else has the rollout yet.
        whole = None if trace is None else _get_trace(trace, next(prompts), read)
        force_setattr(call, "trace", whole)
    return rollout


def _put_trace(trace: TokenTrace) -> _Trace:
    kept, logprobs = trace.kept_token_ids, trace.completion_logprobs
    spans = [(s.start, s.end, s.version, s.attempt) for s in trace.version_spans]
    return _Trace(
        _put_ids(trace.prompt_token_ids),
        _put_ids(trace.completion_token_ids),
        None if logprobs is None else _put_floats(logprobs),
        _put("<i8", [number for span in spans for number in span]),
        None if kept is None else _put_kept(kept),
    )


def _get_trace(
    data: _Trace, prompt: tuple[int, ...], read: Callable[[NDArray[Any]], Any]
) -> TokenTrace:
    spans = iter(_plain(_get(data.spans)))
    return TokenTrace(
        prompt,
        read(_get(data.completion)),
        None if data.logprobs is None else read(_get(data.logprobs)),
        tuple(VersionSpan(*span) for span in zip(spans, spans, spans, spans, strict=True)),
        None if data.kept is None else _get_kept(*data.kept),
    )


def _put_kept(kept: Sequence[Sequence[int]]) -> tuple[_Array, _Array]:
    return _put("<i8", [len(ids) for ids in kept]), _put_ids([i for ids in kept for i in ids])


def _get_kept(lengths: _Array, ids: _Array) -> tuple[tuple[int, ...], ...]:
    counts, flat = _plain(_get(lengths)), _plain(_get(ids))
    if not (are_ids(counts) and are_ids(flat)) or sum(counts) != len(flat):
        raise SerializationError("the kept ids of a model call are no ids, or do not add up")
    return tuple(flat[a:b] for a, b in pairwise((0, *accumulate(counts))))


def _put_ids(values: Sequence[int]) -> _Array:
    try:
        return _put("<i4", values)
    except struct.error:  # one of more than 31 bits
        return _put("<i8", values)


def _put_floats(values: Sequence[float]) -> _Array:
    """In half the room where nothing is lost by it, which is the rule: log-probs are float32."""
    with suppress(OverflowError):
        if _plain(_get(small := _put("<f4", values))) == tuple(values):
            return small
    return _put("<f8", values)


_CODES = {"<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"}


def _put(dtype: _Dtype, values: Sequence[float]) -> _Array:
    return _Array(dtype, struct.pack(f"<{len(values)}{_CODES[dtype]}", *values))


def _get(array: _Array) -> NDArray[Any]:
    """Raises `ValueError` for one that is cut."""
    return np.frombuffer(array.data, array.dtype)


def _plain(array: NDArray[Any]) -> tuple[Any, ...]:
    return tuple(array.tolist())


def _all_of(arrays: Iterable[_Array]) -> list[NDArray[Any]]:
    """All their numbers, in one array for each type."""
    data: dict[_Dtype, list[bytes]] = {}
    for array in arrays:
        data.setdefault(array.dtype, []).append(array.data)
    return [np.frombuffer(b"".join(parts), dtype) for dtype, parts in data.items()]


def pack(kind: str, body: Any) -> bytes:
    """Returns `body` as one message."""
    plain = msgspec.msgpack.encode(body)
    _check_size(f"a {kind}", len(plain), MAX_BODY_BYTES)
    packed = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(plain)
    envelope = _Envelope(SCHEMA, kind, len(plain), _checksum(kind, packed), packed)
    message = msgspec.msgpack.encode(envelope)
    _check_size(f"a {kind}", len(message), MAX_MESSAGE_BYTES)
    return message


def unpack(kind: str, message: bytes, cls: Any = Any) -> Any:
    """Returns the body of a message of this kind, which must be of type `cls`.

    Raises `SchemaVersionError` for a newer schema, and `SerializationError` for whatever is
    damaged, too large, or of another kind.
    """
    _check_size("a message", len(message), MAX_MESSAGE_BYTES)
    envelope = _opened(message)
    if envelope.kind != kind:
        raise SerializationError(f"a message of kind {envelope.kind!r:.40} where a {kind} belongs")
    if envelope.schema > SCHEMA:
        raise _newer(envelope.schema)
    if _checksum(kind, envelope.body) != envelope.checksum or envelope.schema < 1:
        raise SerializationError(f"a {kind} is damaged: its checksum does not fit")
    try:
        return msgspec.msgpack.decode(_decompressed(envelope), type=ready(cls))
    except _NOT_MSGPACK as exc:
        raise SerializationError(f"the body is not that of a {kind}: {exc}") from exc


def _opened(message: bytes) -> _Envelope:
    try:
        return msgspec.msgpack.decode(message, type=ready(_Envelope))
    except _NOT_MSGPACK as exc:
        try:
            schema = msgspec.msgpack.decode(message, type=list[Any])[0]
        except (*_NOT_MSGPACK, IndexError):
            schema = None
        if type(schema) is int and schema > SCHEMA:
            raise _newer(schema) from None
        raise SerializationError(f"not a message of a pipeline: {exc}") from exc


def _decompressed(envelope: _Envelope) -> bytes:
    _check_size("a body", envelope.size, MAX_BODY_BYTES)
    try:
        # The frame says its size itself, and zstandard goes by that before any limit it is given.
        if zstandard.get_frame_parameters(envelope.body).content_size != envelope.size:
            raise SerializationError("a message is damaged: its two sizes differ")
        plain = zstandard.ZstdDecompressor().decompress(
            envelope.body, max_output_size=envelope.size, allow_extra_data=False
        )
    except (zstandard.ZstdError, MemoryError) as exc:
        raise SerializationError(f"a message is damaged: {exc}") from exc
    if len(plain) != envelope.size:
        raise SerializationError("a message is damaged: its body is cut")
    return plain


def _check_size(what: str, size: int, most: int) -> None:
    if not 0 <= size <= most:
        raise SerializationError(f"{what} of {size:,} bytes is over the limit of {most:,}")


def _newer(schema: int) -> SchemaVersionError:
    return SchemaVersionError(
        f"a message has schema {schema}, and this version of Ludic reads up to {SCHEMA}: use the "
        "same version for actors and trainer"
    )


def _checksum(kind: str, packed: bytes) -> bytes:
    return blake2b(packed, digest_size=16, person=kind.encode()[:16]).digest()
