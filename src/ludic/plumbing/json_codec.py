"""Typed data to JSON and back, without loss.

pydantic reads and writes by the annotations, strictly in both directions: what is written reads
back as an equal value, and whatever would come back changed (a tuple where JSON has only lists, a
NumPy integer, a key that is not a string, half of a surrogate pair) is refused, with its place.
Floats keep every bit, NaN and the infinities included. Ordinary values, which are nearly all, are
written by msgspec: the same text in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, overload

from ludic.errors import SerializationError
from ludic.plumbing.json_shapes import MAX_DEPTH, MAX_INT_BITS, shape_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


class _FreeObject:
    """Marks a mapping whose values may be any JSON: read as it is, checked before it is written."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.json_or_python_schema(
            json_schema=core_schema.dict_schema(core_schema.str_schema()),
            python_schema=core_schema.no_info_plain_validator_function(_checked_object),
        )


class ByKind:
    """Marks a union of dataclasses that a literal field `kind` tells apart."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import Discriminator

        return handler(Annotated[source, Discriminator("kind")])


JsonObject: TypeAlias = Annotated[Mapping[str, Any], _FreeObject()]
"""Values must be JSON: None, bool, int, float, str, list, dict."""


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter  # half a second: not for everyone who imports us
    from typing_extensions import TypeAliasType

    config = ConfigDict(
        strict=True,
        extra="forbid",
        revalidate_instances="always",
        ser_json_inf_nan="constants",
    )
    # An alias, because pydantic takes a configuration only for types that cannot have their own.
    stored: Any = TypeAliasType("Stored", cls)
    return TypeAdapter(stored, config=config)


@cache
def encoder() -> Callable[[Any], bytes]:
    """Returns the function that writes JSON fast and checks nothing; several threads may call it
    at once."""
    import msgspec

    return msgspec.json.Encoder().encode


def to_json(value: Any, cls: Any = None) -> bytes:
    """One line of UTF-8 JSON, with `from_json(type(value), to_json(value)) == value`.

    `cls` says as what to write a value whose own type does not tell (a `Message` is a dict).
    Raises `SerializationError` for what JSON cannot hold without loss.
    """
    cls = type(value) if cls is None else cls
    try:
        if (shape := shape_of(cls)) is not None and shape.holds(value):
            return encoder()(value)
    except (TypeError, ValueError, OverflowError):  # numbers or text that JSON cannot hold
        pass
    return _checked_json(value, cls)


def _checked_json(value: Any, cls: Any) -> bytes:
    """Writes out-of-the-ordinary values (NaN, a subclass of str), and says what is wrong."""
    from pydantic import ValidationError
    from pydantic_core import PydanticSerializationError

    adapter = _adapter(cls)
    try:
        return adapter.dump_json(adapter.validate_python(value))
    except ValidationError as exc:
        raise SerializationError(f"cannot write {_place(cls, exc)}") from None
    except PydanticSerializationError as exc:  # half of a surrogate pair
        raise SerializationError(
            f"cannot write this {_name(cls)}: {exc}: decode bytes with errors='replace' to avoid it"
        ) from None


@overload
def from_json(cls: type[T], data: bytes | str) -> T: ...
@overload
def from_json(cls: Any, data: bytes | str) -> Any: ...
def from_json(cls: Any, data: bytes | str) -> Any:
    """Reads what `to_json` wrote; raises `SerializationError` that names the field at fault.

    A field that is absent takes its default; one that the type does not have is an error.
    """
    return _read(cls, _adapter(cls).validate_json, data)


def from_plain(cls: Any, data: Any) -> Any:
    """A typed dict from dicts, lists, strings and numbers, checked in the same way."""
    return _read(cls, _adapter(cls).validate_python, data)


def _read(cls: Any, validate: Callable[[Any], Any], data: Any) -> Any:
    from pydantic import ValidationError

    try:
        return validate(data)
    except ValidationError as exc:
        raise SerializationError(f"cannot read {_place(cls, exc)}") from None


def check_json(value: Any, where: str) -> None:
    """Raises `SerializationError`, naming `where`, unless `value` survives JSON unchanged."""
    if (wrong := _not_json(value)) is not None:
        raise SerializationError(f"{where}{wrong}")


def _checked_object(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"not a dict but {_shown(value)}")
    if (wrong := _not_json(value)) is not None:
        raise ValueError(wrong)
    return value


_TEXT_OR_FLOAT = (str, float)


def _not_json(value: Any, path: str = "", depth: int = 0) -> str | None:
    """The first place under `value` that JSON would change, and why."""
    if value is None or isinstance(value, _TEXT_OR_FLOAT):
        return None
    if isinstance(value, int):
        return f"{path} has too many digits" if value.bit_length() > MAX_INT_BITS else None
    if depth >= MAX_DEPTH:
        return f"{path} is nested more than {MAX_DEPTH} deep"
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return f"{path} has the key {_shown(key)}; JSON has only strings"
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        hint = "use a list" if isinstance(value, tuple | set | frozenset) else "convert it first"
        return f"{path} is {_shown(value)}, which JSON does not have: {hint}"
    for key, item in items:
        if (wrong := _not_json(item, f"{path}[{key!r}]", depth + 1)) is not None:
            return wrong
    return None


def _name(cls: Any) -> str:
    return cls.__name__ if isinstance(cls, type) else str(cls).replace("ludic.types.", "")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _place(cls: Any, exc: ValidationError) -> str:
    """Where the first error lies, and what it is."""
    error = exc.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    return f"{_name(cls)}{path}: {error['msg'].removeprefix('Value error, ')}"
