"""What is wrong with a run file, in words: the key, the nearest right one, and the line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ludic.plumbing.arguments import near_names
from ludic.runs.settings.base import Section, section_of
from ludic.runs.settings.run import RunConfig


def explain(error: Any, data: Mapping[str, Any], text: str, overridden: Sequence[str]) -> str:
    """Returns what is wrong with one setting: its key, the nearest right one, and the line."""
    path = [str(part) for part in error["loc"]]
    tables = data.get(path[0]) if path else None
    if path[1:2] == ["0"] and not (isinstance(tables, list) and len(tables) > 1):
        path = [path[0], *path[2:]]  # the only one
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = _known_keys(path[:-1])
        near = near_names(path[-1], known) or _elsewhere(path[-1])
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        problem = f"unknown key {key!r}: {hint}"
    elif error["type"] == "missing":
        problem = f"{key!r} is missing"
        if key == "env":
            problem += ': name an environment, as in [env] kind = "tic_tac_toe"'
    else:
        said, given = error["msg"].removeprefix("Value error, "), error["input"]
        shown = f"{key!r}" if isinstance(given, dict) else f"{key!r} = {given!r}"
        if error["type"] == "literal_error" and isinstance(given, str):
            options = re.findall(r"'([^']*)'", error["ctx"]["expected"])
            near = near_names(given, options)
            said += f"; did you mean {near[0]!r}?" if near else ""
        problem = f"{shown}: {said[0].lower()}{said[1:]}"
    if key in overridden:
        return f"{problem} (from the command line)"
    line = _line_of(path, text)
    return f"{problem} (line {line})" if line else problem


def _elsewhere(name: str) -> list[str]:
    """Returns the keys of the other tables that this one may have been meant for, as `a.b`."""
    keys = {".".join([*path, key]): key for path, key in _all_keys(RunConfig)}
    near = near_names(name, dict.fromkeys(keys.values()), cutoff=0.8)
    return [whole for whole, key in keys.items() if key in near]


def _all_keys(section: type[Section], path: Sequence[str] = ()) -> list[tuple[list[str], str]]:
    found = []
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            found.append(([*path], field.alias or name))
        else:
            found += _all_keys(inner, [*path, name])
    # Those of the reinforcement are meant most.
    return sorted(found, key=lambda key: key[0] != ["training"])


def _known_keys(path: Sequence[str]) -> list[str]:
    table: type[Section] = RunConfig
    for part in path:
        if part.isdigit():
            continue
        field = table.model_fields.get(part)
        inner = section_of(field.annotation) if field else None
        if inner is None:
            return []
        table = inner
    return [field.alias or name for name, field in table.model_fields.items()]


def _line_of(path: Sequence[str], text: str) -> int | None:
    """Returns the line that sets `path`, or the header of the deepest table on the way to it."""
    wanted = [part for part in path if not part.isdigit()]
    table: list[str] = []
    best: tuple[int, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if header := re.match(r"\[{1,2}\s*([^\]]+?)\s*\]{1,2}", stripped):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            here = table
        elif assignment := re.match(r"([A-Za-z0-9_.\"'-]+)\s*=", stripped):
            here = table + [part.strip("\"'") for part in assignment[1].split(".")]
        else:
            continue
        if here == wanted[: len(here)] and (best is None or len(here) > best[0]):
            best = (len(here), number)
    return best[1] if best else None
