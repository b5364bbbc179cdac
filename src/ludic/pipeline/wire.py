"""The envelope of every message: msgpack with a schema number, a checksum and a compressed body.

Nothing is unpickled and nothing is executed. Sizes are checked before a message is decompressed,
while it is, and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from ludic.errors import SchemaVersionError, SerializationError

SCHEMA = 1
"""The version of the messages' layout; a message of a newer one is refused."""

_DTYPES = ("<i4", "<i8", "<f4", "<f8")
_NOT_MSGPACK = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """The largest message, as it travels and after decompression."""

    packed_bytes: int = 64 * 2**20
    body_bytes: int = 256 * 2**20


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    schema: int
    kind: str
    size: int
    checksum: bytes
    body: bytes


_read_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_read_schema = msgspec.msgpack.Decoder(list[Any]).decode
_write = msgspec.msgpack.Encoder().encode


def pack(kind: str, body: Any, limits: SizeLimits | None = None) -> bytes:
    """Returns `body` (dicts, lists, text, numbers, bytes) as one message."""
    limits = limits or SizeLimits()
    plain = _write(body)
    if len(plain) > limits.body_bytes:
        raise SerializationError(
            f"a {kind} of {len(plain):,} bytes is over the limit of {limits.body_bytes:,}"
        )
    packed = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(plain)
    message = _write(_Envelope(SCHEMA, kind, len(plain), _sum(kind, packed), packed))
    if len(message) > limits.packed_bytes:
        raise SerializationError(
            f"a {kind} of {len(message):,} bytes is over the limit of {limits.packed_bytes:,}"
        )
    return message


def unpack(kind: str, message: bytes, limits: SizeLimits | None = None) -> Any:
    """Returns the body of a message of this kind.

    Raises `SchemaVersionError` for a newer schema, and `SerializationError` for whatever is
    damaged, too large, or of another kind.
    """
    limits = limits or SizeLimits()
    if len(message) > limits.packed_bytes:
        raise SerializationError(
            f"a message of {len(message):,} bytes is over the limit of {limits.packed_bytes:,}"
        )
    envelope = _opened(message)
    if envelope.kind != kind:
        raise SerializationError(f"a message of kind {envelope.kind!r:.40} where a {kind} belongs")
    if envelope.schema > SCHEMA:
        raise _newer(envelope.schema)
    if _sum(kind, envelope.body) != envelope.checksum or envelope.schema < 1:
        raise SerializationError(f"a {kind} is damaged: its checksum does not fit")
    try:
        return msgspec.msgpack.decode(_decompressed(envelope, limits))
    except _NOT_MSGPACK as exc:
        raise SerializationError(f"the body of a {kind} is not msgpack: {exc}") from exc


def _opened(message: bytes) -> _Envelope:
    try:
        return _read_envelope(message)
    except _NOT_MSGPACK as exc:
        try:
            schema = _read_schema(message)[0]
        except (*_NOT_MSGPACK, IndexError):
            schema = None
        if type(schema) is int and schema > SCHEMA:
            raise _newer(schema) from None
        raise SerializationError(f"not a message of a pipeline: {exc}") from exc


def _decompressed(envelope: _Envelope, limits: SizeLimits) -> bytes:
    if not 0 <= envelope.size <= limits.body_bytes:
        raise SerializationError(
            f"a body of {envelope.size:,} bytes is over the limit of {limits.body_bytes:,}"
        )
    try:
        # The frame says its size itself, and zstandard goes by that before any limit it is given.
        said = zstandard.get_frame_parameters(envelope.body).content_size
        if said != envelope.size:
            raise SerializationError("a message is damaged: its two sizes differ")
        plain = zstandard.ZstdDecompressor().decompress(
            envelope.body, max_output_size=envelope.size, allow_extra_data=False
        )
    except (zstandard.ZstdError, MemoryError) as exc:
        raise SerializationError(f"a message is damaged: {exc}") from exc
    if len(plain) != envelope.size:
        raise SerializationError("a message is damaged: its body is cut")
    return plain


def _newer(schema: int) -> SchemaVersionError:
    return SchemaVersionError(
        f"a message has schema {schema}, and this version of Ludic reads up to {SCHEMA}: use the "
        "same version for actors and trainer"
    )


def _sum(kind: str, packed: bytes) -> bytes:
    return blake2b(packed, digest_size=16, person=kind.encode()[:16]).digest()


def put_array(values: NDArray[Any]) -> list[Any]:
    """Returns an array as its type's name and its bytes."""
    code = values.dtype.newbyteorder("<").str
    if code not in _DTYPES:
        raise SerializationError(f"an array of {values.dtype} cannot be sent")
    return [code, values.astype(code, copy=False).tobytes()]


def get_array(value: Any) -> NDArray[Any]:
    """The inverse of `put_array`; the array is read-only."""
    match value:
        case [str(code), bytes(data)] if code in _DTYPES:
            try:
                return np.frombuffer(data, dtype=code)
            except ValueError as exc:
                raise SerializationError(f"an array of a message is cut: {exc}") from exc
    raise SerializationError(f"not an array of a message: {value!r:.80}")
