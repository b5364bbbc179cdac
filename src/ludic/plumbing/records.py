"""Records: frozen data that is stored or sent, and its JSON, without loss.

A record is a frozen `msgspec.Struct`, and msgspec writes and reads it by its annotations. What is
written reads back as an equal value; whatever would come back changed (a tuple where JSON has only
lists, a NumPy integer, a key that is not a string, half of a surrogate pair) is refused, with its
place. Reading is as strict: `1.0` is not an int, and a field that a record does not have is an
error.

NaN and the infinities have one rule, here and wherever a record is stored: they are written as
`NaN`, `Infinity` and `-Infinity`, as Python's own `json` does, and read back as what they were.
Where a number must be finite (a reward, a log-prob), the record refuses them itself.

>>> from msgspec.structs import replace
>>> class Point(Record, frozen=True):
...     x: float
...     y: float = 0.0
>>> to_json(replace(Point(1.0), y=float("inf")))
b'{"x":1.0,"y":Infinity}'
>>> from_json(Point, '{"x":1.0,"y":Infinity}')
Point(x=1.0, y=inf)
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import msgspec
from msgspec.structs import force_setattr

from ludic.errors import SchemaVersionError, SerializationError
from ludic.plumbing.text import clean_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)

_NOT_PLAIN = (TypeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for values that `_exact_json` writes, or says what is wrong with."""

JsonObject: TypeAlias = Mapping[str, Any]
"""Values must be JSON: None, bool, int, float, str, list, dict."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all records. `msgspec.structs.replace` changes a copy, and checks it as new."""


def changed(record: R, /, **changes: Any) -> R:
    """What `msgspec.structs.replace` returns, without the checks in `__post_init__`: `record`
    passed them, and the caller vouches for the changes."""
    copy: R = record.__copy__()  # type: ignore[attr-defined]
    try:
        for name, value in changes.items():
            force_setattr(copy, name, value)
    except AttributeError:
        raise TypeError(f"{type(record).__name__} has no field {name!r}") from None
    return copy


class Numbers(Sequence[Any]):
    """Token ids or log-probs that read as a tuple of plain numbers does, and are made and joined at
    a fraction of its price: no object for each. Equal to that tuple, with its hash and its text.

    Whoever makes one has checked `array`: floats are finite, and ints are from 0 on. Nobody may
    write to it.

    >>> import numpy as np
    >>> ids = Numbers(np.array([5, 6, 7]))
    >>> ids, ids[0], ids[1:] + (8,), ids == (5, 6, 7)
    ((5, 6, 7), 5, (6, 7, 8), True)
    """

    __slots__ = ("array",)

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array.tolist())

    def __getitem__(self, at: Any) -> Any:
        part = self.array[at]
        return Numbers(part) if isinstance(at, slice) else part.item()

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Numbers):
            import numpy as np  # here, so that records are read and written without it

            return Numbers(np.concatenate((self.array, other.array)))
        return tuple(self) + other if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other + tuple(self) if isinstance(other, tuple) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbers):
            return len(self) == len(other) and bool((self.array == other.array).all())
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _basic(value: Any) -> Any:
    """A number or text of a subclass (`numpy.float64`, say) as what it is."""
    if isinstance(value, Numbers):
        return value.array.tolist()
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    raise TypeError(f"JSON does not have a {type(value).__name__}")


encode: Callable[[Any], bytes] = msgspec.json.Encoder(enc_hook=_basic).encode
"""Writes JSON fast and checks nothing (NaN becomes null); several threads may call it at once."""


_making = threading.Lock()


@cache
def _decoder(cls: Any) -> Callable[[bytes | str], Any]:
    with _making:
        return msgspec.json.Decoder(cls).decode


def ready(cls: T) -> T:
    """Returns the type, which several threads may now give to msgspec at once. Not before: it notes
    on a class how to read it, and others see that before it is complete, which ends the process."""
    _decoder(cls)
    return cls


def to_json(value: Any, cls: Any = None) -> bytes:
    """One line of UTF-8 JSON, with `from_json(type(value), to_json(value)) == value`.

    `cls` says as what to write a value whose own type does not tell (a `Message` is a dict).
    Raises `SerializationError` for what JSON cannot hold without loss.
    """
    cls = type(value) if cls is None else cls
    return _checked_json(value, cls, f"cannot write {_name(cls)}")


def check_json(value: Any, where: str) -> None:
    """Raises `SerializationError`, naming `where`, unless `value` survives JSON unchanged."""
    _checked_json(value, Any, where)


def json_copy(value: Any, where: str) -> Any:
    """A copy of a JSON value, to the last list, with its text cleaned (`clean_text`); whoever made
    the value may change it afterwards. Raises `SerializationError`, naming `where`, unless the copy
    survives JSON unchanged."""
    try:
        copy = _decoder(Any)(encode(value))
        if copy == value:
            return copy
    except _NOT_PLAIN:
        pass
    try:
        copy = clean_json(value)
    except RecursionError:
        raise SerializationError(f"{where}: {_TOO_DEEP}") from None
    _exact_json(copy, Any, where)
    return copy


def _checked_json(value: Any, cls: Any, where: str) -> bytes:
    text = plain_json(value, cls)
    return _exact_json(value, cls, where) if text is None else text


def plain_json(value: Any, cls: Any) -> bytes | None:
    """What `encode` writes, if it reads back as an equal value."""
    try:
        text = encode(value)
        return text if _decoder(cls)(text) == value else None
    except _NOT_PLAIN:
        return None


_TOO_DEEP = "it is nested too deeply, or holds itself"


def _exact_json(value: Any, cls: Any, where: str) -> bytes:
    """Writes NaN and the infinities too, and says what is wrong with everything else."""
    try:
        plain = msgspec.to_builtins(value, enc_hook=_basic_or_none)
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
        again = msgspec.convert(json.loads(text), ready(cls))
    except msgspec.ValidationError as exc:
        raise SerializationError(where + _fault(exc)) from None
    except RecursionError:
        raise SerializationError(f"{where}: {_TOO_DEEP}") from None
    except UnicodeEncodeError as exc:
        raise SerializationError(
            f"{where}: {exc}: decode bytes with errors='replace' to avoid it"
        ) from None
    except (TypeError, ValueError) as exc:  # an integer of too many digits, for one
        raise SerializationError(f"{where}: {exc}") from None
    if (difference := _difference(value, again)) is not None:
        raise SerializationError(where + difference)
    return text


def _basic_or_none(value: Any) -> Any:
    try:
        return _basic(value)
    except TypeError:
        return None


_LEAVES = (str, int, float, type(None))


def _difference(value: Any, again: Any, path: str = "") -> str | None:
    """The first place at which `again`, read back from JSON, is not `value`, and why."""
    pairs: list[tuple[str, Any, Any]] = []
    value = tuple(value) if isinstance(value, Numbers) else value
    if isinstance(value, msgspec.Struct) and type(value) is type(again):
        names = value.__struct_fields__
        pairs = [(f".{name}", getattr(value, name), getattr(again, name)) for name in names]
    elif isinstance(value, dict) and isinstance(again, dict):
        for key in value:
            if key not in again:
                wrong = "not one of its keys" if isinstance(key, str) else "JSON has only strings"
                return f"{path}: the key {_shown(key)}: {wrong}"
        pairs = [(f"[{key!r}]", item, again[key]) for key, item in value.items()]
    elif isinstance(value, list | tuple) and type(value) is type(again):
        pairs = [
            (f"[{at}]", item, other)
            for at, (item, other) in enumerate(zip(value, again, strict=True))
        ]
    elif not isinstance(value, _LEAVES) or not (
        value == again or (value != value and again != again)  # NaN is not itself
    ):
        hint = "use a list" if isinstance(value, tuple | set | frozenset) else "convert it first"
        return f"{path}: {_shown(value)}, which JSON does not have: {hint}"
    differences = (_difference(item, other, path + at) for at, item, other in pairs)
    return next((difference for difference in differences if difference is not None), None)


@overload
def from_json(cls: type[T], data: bytes | str) -> T: ...
@overload
def from_json(cls: Any, data: bytes | str) -> Any: ...
def from_json(cls: Any, data: bytes | str) -> Any:
    """Reads what `to_json` wrote; raises `SerializationError` that names the field at fault.

    A field that is absent takes its default; one that the record does not have is an error.
    """
    try:
        return _decoder(cls)(data)
    except msgspec.ValidationError as exc:
        raise SerializationError(f"cannot read {_name(cls)}{_fault(exc)}") from None
    except _NOT_PLAIN as exc:
        try:  # NaN and the infinities, which only Python's own reader takes
            plain = json.loads(data)
            encode(plain)  # refuses halves of surrogate pairs
        except _NOT_PLAIN:
            raise SerializationError(f"cannot read {_name(cls)}: Invalid JSON: {exc}") from None
    return from_plain(cls, plain)


def from_plain(cls: type[T], data: Any) -> T:
    """A value of type `cls` from dicts, lists, strings and numbers, checked in the same way."""
    try:
        return msgspec.convert(data, ready(cls))
    except msgspec.ValidationError as exc:
        raise SerializationError(f"cannot read {_name(cls)}{_fault(exc)}") from None
    except UnicodeEncodeError as exc:  # half of a surrogate pair where a record has a name
        raise SerializationError(f"cannot read {_name(cls)}: {exc}") from None


def check_schema(row: Any, newest: int, what: str) -> None:
    """Raises `SerializationError` for a row without a schema number, and `SchemaVersionError` for
    one whose layout only a later version of Ludic knows."""
    schema = row.get("schema") if isinstance(row, Mapping) else None
    if not isinstance(schema, int):
        raise SerializationError(f"{what}: it has no schema number, so it is not one of Ludic's")
    if schema > newest:
        raise SchemaVersionError(
            f"{what}: schema {schema}, and this version of Ludic reads up to {newest}: update "
            "Ludic to read it"
        )


def _fault(exc: msgspec.ValidationError) -> str:
    """Where an error lies (`.steps[0].reward`), and what it is."""
    wrong, _, place = str(exc).partition(" - at `$")
    return f"{place.removesuffix('`')}: {wrong}"


def _name(cls: Any) -> str:
    return cls.__name__ if isinstance(cls, type) else str(cls).replace("ludic.types.", "")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
