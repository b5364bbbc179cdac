"""What the tables of a run file have in common; servers, and their keys, which no file holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
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

from ludic.errors import ConfigError, LudicError, near_names
from ludic.inference.addresses import find_key, without_user

_UNION_MEMBER = re.compile(r"(constrained-|literal\[|list\[|dict\[|(int|str|float|bool)$)")
"""What pydantic adds to the place of a value that may be of several types."""


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


def explain_problem(
    run: type[Section], error: Any, data: Mapping[str, Any], text: str, overridden: Sequence[str]
) -> str:
    """Returns what is wrong with one setting of a `run`: its key, the nearest right one, and the
    line."""
    path = [str(part) for part in error["loc"] if not _UNION_MEMBER.match(str(part))]
    tables = data.get(path[0]) if path else None
    if path[1:2] == ["0"] and not (isinstance(tables, list) and len(tables) > 1):
        path = [path[0], *path[2:]]  # the only one
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        table = [part for part in path[:-1] if not part.isdigit()]
        names = [name for place, name in _all_keys(run) if place == table]
        exact = [".".join([*place, name]) for place, name in _all_keys(run) if name == key]
        near = exact or near_names(path[-1], names) or _elsewhere(run, path[-1])
        hint = (
            f"did you mean {' or '.join(map(repr, exact or near[:1]))}?"
            if near
            else f"known here: {', '.join(sorted(names))}"
        )
        problem = f"unknown key {key!r}: {hint}"
    elif error["type"] == "missing":
        problem = f"{key!r} is missing"
        if key == "env":
            problem += ': name an environment, as in [env] kind = "tic_tac_toe"'
    else:
        fault, value = error["msg"].removeprefix("Value error, "), error["input"]
        shown = f"{key!r}" if isinstance(value, dict) else f"{key!r} = {value!r}"
        if error["type"] == "literal_error" and isinstance(value, str):
            options = re.findall(r"'([^']*)'", error["ctx"]["expected"])
            near = near_names(value, options)
            fault += f"; did you mean {near[0]!r}?" if near else ""
        problem = f"{shown}: {fault[0].lower()}{fault[1:]}"
    if any(f"{place}.".startswith(f"{key}.") for place in overridden):
        return f"{problem} (from the command line)"
    line = _line_of(path, text)
    return f"{problem} (line {line})" if line else problem


def _elsewhere(run: type[Section], name: str) -> list[str]:
    """Returns the keys of the other tables that this one may have been meant for, as `a.b`."""
    keys = {".".join([*path, key]): key for path, key in _all_keys(run)}
    near = near_names(name, dict.fromkeys(keys.values()), cutoff=0.8)
    return [whole for whole, key in keys.items() if key in near]


def _all_keys(section: type[Section], path: Sequence[str] = ()) -> list[tuple[list[str], str]]:
    """Returns every key below a table, those that are tables too, each with where it stands."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(([*path], field.alias or name))
        if (inner := section_of(field.annotation)) is not None:
            keys += _all_keys(inner, [*path, name])
    # Those of the reinforcement are meant most.
    return sorted(keys, key=lambda key: key[0] != ["training"])


def _line_of(path: Sequence[str], text: str) -> int | None:
    """Returns the line that sets `path`, or the header of the deepest table on the way to it."""
    wanted = [part for part in path if not part.isdigit()]
    table: list[str] = []
    best: tuple[int, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if header := re.match(r"\[{1,2}\s*([^\]]+?)\s*\]{1,2}", stripped):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            place = table
        elif assignment := re.match(r"([A-Za-z0-9_.\"'-]+)\s*=", stripped):
            place = table + [part.strip("\"'") for part in assignment[1].split(".")]
        else:
            continue
        if place == wanted[: len(place)] and (best is None or len(place) > best[0]):
            best = (len(place), number)
    return best[1] if best else None
