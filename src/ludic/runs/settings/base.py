"""What the tables of a run file have in common; servers, and their keys, which no file holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ludic.errors import ConfigError, LudicError
from ludic.inference.addresses import find_key, without_user


class Section(BaseModel):
    """A table of the run file. Unknown keys are errors, and so are NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_text_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Raises for `steps = "4"` and `steps = true`, which would pass as 4 and 1."""
        assert info.field_name is not None
        takes = _scalars(cls.model_fields[info.field_name].annotation)
        if takes and not takes & {str, Any}:
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, str) or (isinstance(item, bool) and bool not in takes):
                    what = "true or false" if bool in takes else "a number"
                    raise ValueError(f"input should be {what}, not {json.dumps(item)}")
        return value


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the table that an annotation names, if it does."""
    options = [annotation, *get_args(annotation)]
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


def _scalars(annotation: Any) -> set[Any]:
    """The plain types that a field takes; nothing if it takes anything else besides them."""
    if annotation in (int, float, bool, str, Any):
        return {annotation}
    options = [o for o in get_args(annotation) if o is not type(None)]
    parts = [_scalars(o) for o in options]
    if get_origin(annotation) is Literal or not parts or not all(parts):
        return set()
    return set().union(*parts)


def settings_in(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the place, as `a.0.b`, and the value of every setting in tables within tables."""
    if not isinstance(data, Mapping | list):
        yield path, data
        return
    for key, value in data.items() if isinstance(data, Mapping) else enumerate(data):
        yield from settings_in(value, f"{path}.{key}" if path else str(key))


def _without_nan(arguments: dict[str, Any]) -> dict[str, Any]:
    """Raises if there is a NaN among a part's arguments, which most checks would let through."""
    for path, value in settings_in(arguments):
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{path} is not a number (nan)")
    return arguments


Arguments: TypeAlias = Annotated[dict[str, Any], AfterValidator(_without_nan)]


@contextmanager
def configuring(what: str) -> Iterator[None]:
    """Turns whatever a part raises while it is made into a `ConfigError` about `what`."""
    try:
        yield
    except LudicError:
        raise
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{what}: {exc}") from exc
    except Exception as exc:
        raise ConfigError(f"{what} cannot be made: {type(exc).__name__}: {exc}") from exc


class PartSection(Section):
    """A registered part by name, with its arguments."""

    kind: str
    kwargs: Arguments = {}


def _checked(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"an address begins with http:// or https://; try http://{address}")
    return address


Address: TypeAlias = Annotated[str, AfterValidator(_checked)]


class KeyedSection(Section):
    """A table with the key to a server: its place, and never the key itself."""

    api_key_env: str | None = None
    api_key_file: str | None = None

    @model_validator(mode="after")
    def _one_key(self) -> KeyedSection:
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("give api_key_env or api_key_file, not both")
        return self


def read_key(section: KeyedSection, where: str) -> str | None:
    """Returns the key that a table names; None if it names none. `where` is the table's name."""
    return find_key(section.api_key_env, section.api_key_file, where)


def check_no_secrets(data: Mapping[str, Any], source: str) -> None:
    """Raises if an address anywhere in a run's tables has a user or a password in it, which would
    be stored with the run. The error shows neither."""
    for path, value in settings_in(data):
        if isinstance(value, str) and without_user(value) != value:
            raise ConfigError(
                f"{source}: {path!r} has a user or a password in its address, which would be "
                "stored with the run: leave them out, and name the environment variable or the "
                "file with the server's key as api_key_env or api_key_file"
            )
