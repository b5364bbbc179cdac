"""Typed data to JSON and back, without loss.

A codec is built once per type from its annotations. It is strict in both directions: what it
writes it can read back as an equal value, and whatever would come back changed (a tuple where JSON
has only lists, a NumPy integer, a key that is no string, half of a surrogate pair) is refused, with
the place where it stands. Floats keep every bit, NaN and the infinities included.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
    overload,
)

from ludic.errors import SerializationError

T = TypeVar("T")
Convert = Callable[[Any], Any]

MAX_DEPTH = 100
"""How deeply free-form values may be nested; deeper ones are taken for a cycle."""


@dataclass(frozen=True, slots=True)
class Codec:
    """Both directions of one type: to what the `json` module takes, and back."""

    encode: Convert
    decode: Convert


class _Mismatch(Exception):
    """A value that does not fit its type; the path to it grows while it travels up."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.path = ""

    def under(self, part: str) -> _Mismatch:
        self.path = part + self.path
        return self


def to_plain(value: Any, cls: Any = None) -> Any:
    """`value` as dicts, lists or tuples, strings and numbers, ready for `json` or msgpack."""
    cls = type(value) if cls is None else cls
    try:
        return _codec(cls).encode(value)
    except _Mismatch as wrong:
        raise SerializationError(
            f"{_name(cls)}{wrong.path} cannot be written: {wrong.message}"
        ) from None


@overload
def from_plain(cls: type[T], data: Any) -> T: ...
@overload
def from_plain(cls: Any, data: Any) -> Any: ...
def from_plain(cls: Any, data: Any) -> Any:
    """The inverse of `to_plain`; `SerializationError` names the field at fault."""
    try:
        return _codec(cls).decode(data)
    except _Mismatch as wrong:
        raise SerializationError(f"this is no {_name(cls)}: {wrong.path} {wrong.message}") from None


def to_json(value: Any, cls: Any = None) -> bytes:
    """One line of UTF-8 JSON, with `from_json(type(value), to_json(value)) == value`.

    `cls` says as what to write a value whose own type does not tell (a `Message` is a dict).
    Raises `SerializationError` for what JSON cannot hold without loss.
    """
    plain = to_plain(value, cls)
    try:
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
        return text.encode()
    except UnicodeEncodeError as exc:
        near = exc.object[max(0, exc.start - 20) : exc.start]
        raise SerializationError(
            f"a {_name(cls or type(value))} holds half of a surrogate pair, which is no text"
            f" (after {near!r}): decode bytes with errors='replace' to avoid it"
        ) from None
    except ValueError as exc:  # an integer of more digits than Python converts
        raise SerializationError(f"a {_name(cls or type(value))} cannot be written: {exc}") from exc


@overload
def from_json(cls: type[T], data: bytes | str) -> T: ...
@overload
def from_json(cls: Any, data: bytes | str) -> Any: ...
def from_json(cls: Any, data: bytes | str) -> Any:
    """Reads what `to_json` wrote; raises `SerializationError` that names the field at fault.

    A field that is absent takes its default; one that the type does not have is an error.
    """
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as exc:  # also UnicodeDecodeError, JSONDecodeError
        raise SerializationError(f"this is no {_name(cls)}: it is not JSON: {exc}") from exc
    return from_plain(cls, plain)


def check_json(value: Any, where: str) -> None:
    """Raises `SerializationError`, naming `where`, unless `value` survives JSON unchanged."""
    try:
        _encode_free(value)
    except _Mismatch as wrong:
        raise SerializationError(f"{where}{wrong.path} is not JSON: {wrong.message}") from None


def _name(cls: Any) -> str:
    return cls.__name__ if isinstance(cls, type) else str(cls).replace("ludic.types.", "")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


@cache
def _codec(hint: Any) -> Codec:
    """The codec of a type, by its annotations."""
    if hint in _LEAVES:
        return _LEAVES[hint]
    if isinstance(hint, type):
        if issubclass(hint, Enum):
            return _enum_codec(hint)
        if is_typeddict(hint):
            return _typed_dict_codec(hint)
        if is_dataclass(hint):
            return _dataclass_codec(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _literal_codec(args)
    if origin in (Union, UnionType):
        return _union_codec(args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence_codec(args[0], tuple)
    if origin in (list, Sequence):
        return _sequence_codec(args[0], list)
    if origin in (dict, Mapping) and args[0] is str:
        return _FREE_OBJECT if args[1] is Any else _mapping_codec(args[1])
    raise SerializationError(f"{hint} has no JSON form: use dataclasses, tuples, dicts and numbers")


def _exactly(kind: type) -> Codec:
    def same(value: Any) -> Any:
        # bool is a subclass of int, and would come back as another value's type.
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        raise _Mismatch(f"is not a {kind.__name__} but {_shown(value)}")

    return Codec(same, same)


def _float(value: Any) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            if (as_float := float(value)) == value:
                return as_float
        except OverflowError:
            pass
        raise _Mismatch(f"is the integer {_shown(value)}, which no float equals")
    raise _Mismatch(f"is not a float but {_shown(value)}")


def _enum_codec(kind: type[Enum]) -> Codec:
    members = {member.value: member for member in kind}

    def encode(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _Mismatch(f"is not a {kind.__name__} but {_shown(value)}")
        return value.value

    def decode(value: Any) -> Any:
        try:
            return members[value]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, members))
            raise _Mismatch(f"is {_shown(value)}; a {kind.__name__} is one of {known}") from None

    return Codec(encode, decode)


def _literal_codec(allowed: tuple[Any, ...]) -> Codec:
    def same(value: Any) -> Any:
        if any(value == one and type(value) is type(one) for one in allowed):
            return value
        raise _Mismatch(f"is {_shown(value)}; allowed: {', '.join(map(repr, allowed))}")

    return Codec(same, same)


def _union_codec(hints: tuple[Any, ...]) -> Codec:
    """`X | None`, or dataclasses that are told apart by a literal field `kind`."""
    rest = tuple(hint for hint in hints if hint is not NoneType)
    inner = _codec(rest[0]) if len(rest) == 1 else _tagged_codec(rest)
    if len(rest) == len(hints):
        return inner

    def encode(value: Any) -> Any:
        return None if value is None else inner.encode(value)

    def decode(value: Any) -> Any:
        return None if value is None else inner.decode(value)

    return Codec(encode, decode)


def _tagged_codec(kinds: tuple[Any, ...]) -> Codec:
    if not all(is_dataclass(kind) for kind in kinds):
        raise SerializationError(f"a union needs dataclasses with a field `kind`, not {kinds}")
    by_type = {kind: _codec(kind) for kind in kinds}
    tags = {get_args(get_type_hints(kind)["kind"])[0]: kind for kind in kinds}

    def encode(value: Any) -> Any:
        if (codec := by_type.get(type(value))) is None:
            raise _Mismatch(f"is not one of {', '.join(map(_name, kinds))} but {_shown(value)}")
        return codec.encode(value)

    def decode(value: Any) -> Any:
        tag = value.get("kind") if isinstance(value, dict) else None
        if not isinstance(tag, str) or tag not in tags:
            raise _Mismatch(f"has the kind {tag!r}; known: {', '.join(map(repr, tags))}")
        return by_type[tags[tag]].decode(value)

    return Codec(encode, decode)


def _sequence_codec(item: Any, kind: type[Any]) -> Codec:
    codec = _codec(item)

    def each(values: Any, convert: Convert) -> Any:
        # Token ids and log-probs by the ten thousand: one pass in C says that all are plain.
        if item in _PLAIN_TYPES and set(map(type, values)) <= _PLAIN_TYPES[item]:
            return values
        done = []
        for index, value in enumerate(values):
            try:
                done.append(convert(value))
            except _Mismatch as wrong:
                raise wrong.under(f"[{index}]") from None
        return done

    def encode(values: Any) -> Any:
        if not isinstance(values, kind):
            raise _Mismatch(f"is not a {kind.__name__} but {_shown(values)}")
        return each(values, codec.encode)

    def decode(values: Any) -> Any:
        if not isinstance(values, list | tuple):
            raise _Mismatch(f"is not a list but {_shown(values)}")
        return kind(each(values, codec.decode))

    return Codec(encode, decode)


def _mapping_codec(item: Any) -> Codec:
    codec = _codec(item)

    def convert_with(convert: Convert) -> Convert:
        def run(values: Any) -> Any:
            if not isinstance(values, dict):
                raise _Mismatch(f"is not a dict but {_shown(values)}")
            done = {}
            for key, value in values.items():
                if not isinstance(key, str):
                    raise _Mismatch(f"has the key {_shown(key)}; JSON has only strings")
                try:
                    done[key] = convert(value)
                except _Mismatch as wrong:
                    raise wrong.under(f"[{key!r}]") from None
            return done

        return run

    return Codec(convert_with(codec.encode), convert_with(codec.decode))


def _fields_codec(
    codecs: Mapping[str, Codec],
    required: frozenset[str],
    take: Callable[[Any], Mapping[str, Any]],
    make: Callable[[dict[str, Any]], Any],
) -> Codec:
    """What dataclasses and typed dicts share: named values, some of which must be there."""

    def convert(values: Mapping[str, Any], encode: bool) -> dict[str, Any]:
        done = {}
        for name, value in values.items():
            if (codec := codecs.get(name)) is None:
                raise _Mismatch(f"has a field {name!r} that is not known here")
            try:
                done[name] = codec.encode(value) if encode else codec.decode(value)
            except _Mismatch as wrong:
                raise wrong.under(f".{name}") from None
        if missing := required - done.keys():
            raise _Mismatch(f"lacks {', '.join(map(repr, sorted(missing)))}")
        return done

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Mismatch(f"is not an object but {_shown(value)}")
        done = convert(value, encode=False)
        try:
            return make(done)
        except ValueError as exc:  # the type's own validation
            raise _Mismatch(str(exc)) from exc

    return Codec(lambda value: convert(take(value), encode=True), decode)


def _typed_dict_codec(kind: type) -> Codec:
    hints = get_type_hints(kind, include_extras=True)
    optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
    codecs = {
        name: _codec(get_args(hint)[0] if name in optional else hint)
        for name, hint in hints.items()
    }

    def take(value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise _Mismatch(f"is not a {kind.__name__} but {_shown(value)}")
        return value

    return _fields_codec(codecs, frozenset(hints.keys() - optional), take, lambda done: done)


def _dataclass_codec(kind: Any) -> Codec:
    hints = get_type_hints(kind)
    codecs = {field.name: _codec(hints[field.name]) for field in fields(kind)}
    required = frozenset(
        f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
    )

    def take(value: Any) -> Mapping[str, Any]:
        if type(value) is not kind:  # a subclass would come back as its base
            raise _Mismatch(f"is not a {kind.__name__} but {_shown(value)}")
        return {name: getattr(value, name) for name in codecs}

    return _fields_codec(codecs, required, take, lambda done: kind(**done))


def _encode_free(value: Any, depth: int = 0) -> Any:
    """A value without declared type, as `Info` holds: exactly what JSON has, and nothing else."""
    if value is None or isinstance(value, str | int | float):
        return value
    if depth >= MAX_DEPTH:
        raise _Mismatch(f"is nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _Mismatch(f"has the key {_shown(key)}; JSON has only strings")
            try:
                _encode_free(item, depth + 1)
            except _Mismatch as wrong:
                raise wrong.under(f"[{key!r}]") from None
        return value
    if isinstance(value, list):
        for index, item in enumerate(value):
            try:
                _encode_free(item, depth + 1)
            except _Mismatch as wrong:
                raise wrong.under(f"[{index}]") from None
        return value
    hint = "use a list" if isinstance(value, tuple | set | frozenset) else "convert it first"
    raise _Mismatch(f"is {_shown(value)}, which JSON does not have: {hint}")


def _free(kind: type) -> Codec:
    def same(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _Mismatch(f"is not a {kind.__name__} but {_shown(value)}")
        return _encode_free(value)

    return Codec(same, same)


_LEAVES: dict[Any, Codec] = {
    str: _exactly(str),
    int: _exactly(int),
    bool: _exactly(bool),
    float: Codec(_float, _float),
    NoneType: _literal_codec((None,)),
    Any: Codec(_encode_free, _encode_free),
    dict: _free(dict),
    list: _free(list),
}
_FREE_OBJECT = _LEAVES[dict]
_PLAIN_TYPES: dict[Any, set[type]] = {int: {int}, float: {float}, str: {str}}
