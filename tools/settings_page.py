"""The tables of docs/run_file.md: keys, defaults and types from the settings' classes. What a key
does is written on the page itself, and kept.

python -m tools.settings_page           prints the tables
python -m tools.settings_page --write   brings the page up to date
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from ludic.runs.settings import RunConfig
from ludic.runs.settings.base import Section, section_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "run_file.md"
START = "### `[run]`"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "`true` or `false`"}


def descriptions(page: str) -> dict[tuple[str, str], str]:
    """Returns what the page says each key does, by the names of table and key."""
    table, texts = "", {}
    for line in page.splitlines():
        if heading := re.fullmatch(r"### `\[(.+)\]`", line):
            table = heading[1]
        elif row := re.match(r"\| `(\w+)` \| (.*?) \| ", line):
            texts[table, row[1]] = row[2]
    return texts


def keys(section: type[Section] = RunConfig, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the names of all tables and their keys."""
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from keys(inner, f"{name}.{key}" if name else key)
        elif name:
            yield name, key


def reference(
    texts: Mapping[tuple[str, str], str], section: type[Section] = RunConfig, name: str = ""
) -> str:
    """Returns the page from its first table on: every key with what it does, its default and what
    it takes."""
    rows, below = [], []
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            below.append(reference(texts, inner, f"{name}.{key}" if name else key))
            continue
        default = field.get_default(call_default_factory=True)
        shown = "" if default in (None, PydanticUndefined) else f"`{json.dumps(default)}`"
        rows.append(
            f"| `{key}` | {texts.get((name, key), '')} | {shown} | {_takes(field.annotation)} |"
        )
    if not name:
        return "\n\n".join(below)
    about = " ".join((inspect.getdoc(section) or "").split())
    about = re.split(r"(?<=\.) (?=[A-Z`])", about)[0]  # the table says the rest
    heading = ["| key | meaning | default | type |", "|---|---|---|---|"]
    return "\n\n".join([f"### `[{name}]`", about, "\n".join([*heading, *rows]), *below])


def _takes(annotation: Any) -> str:
    options = [o for o in get_args(annotation) if o is not type(None)]
    origin = get_origin(annotation)
    if origin is not None and str(origin) == "typing.Literal":
        return " or ".join(f"`{json.dumps(option)}`" for option in options)
    if origin is Annotated:
        return _takes(options[0])
    if origin is list:
        return "list of " + " or ".join(f"{kind}s" for kind in _takes(options[0]).split(" or "))
    if origin is tuple:
        return f"list of {len(options)} {_takes(options[0])}s"
    if origin is dict:
        return "table"
    if options:
        return " or ".join(_takes(option) for option in options)
    return _PLAIN.get(annotation, "table")


def main() -> None:
    """Prints the tables, or writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    page = PAGE.read_text(encoding="utf-8")
    tables = reference(descriptions(page))
    if parser.parse_args().write:
        PAGE.write_text(page.partition(START)[0] + tables + "\n", encoding="utf-8")
    else:
        print(tables)


if __name__ == "__main__":
    main()
