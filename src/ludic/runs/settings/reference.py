"""The table of all settings, for the docs."""

from __future__ import annotations

import inspect
import json
import re
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from ludic.runs.settings.base import Section, section_of
from ludic.runs.settings.descriptions import DESCRIPTIONS


def reference_table(section: type[Section], name: str = "") -> str:
    """Returns Markdown: every key of every table, with what it does, its default and what it
    takes."""
    rows, below = [], []
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            shown = f"{name}.{key}" if name else key
            below.append(reference_table(inner, shown))
            continue
        default = field.get_default(call_default_factory=True)
        missing = default is PydanticUndefined
        takes = _takes(field.annotation)
        does = DESCRIPTIONS.get(name, {}).get(key, "")
        cells = [f"`{field.alias or key}`", does, "" if missing else _shown(default), takes]
        rows.append(f"| {' | '.join(cells)} |")
    about = " ".join((inspect.getdoc(section) or "").split())
    about = re.split(r"(?<=\.) (?=[A-Z`])", about)[0]  # the table says the rest
    title = f"### `[{name}]`\n\n{about}\n\n" if name else ""
    table = "\n".join(["| key | what it does | default | takes |", "|---|---|---|---|", *rows])
    return "\n\n".join([title + table if name else "", *below]).strip()


def _shown(default: Any) -> str:
    return "" if default is None else f"`{json.dumps(default)}`"


def _takes(annotation: Any) -> str:
    options = [o for o in get_args(annotation) if o is not type(None)]
    origin = get_origin(annotation)
    if origin is not None and str(origin) == "typing.Literal":
        return " or ".join(f"`{json.dumps(option)}`" for option in options)
    if origin is Annotated:
        return _takes(options[0])
    if origin is list:
        return f"a list of {_takes(options[0])}"
    if origin is tuple:
        return f"a list of {len(options)}: {_takes(options[0])}"
    if origin is dict:
        return "a table"
    if options:
        return " or ".join(_takes(option) for option in options)
    return {str: "text", int: "a whole number", float: "a number", bool: "`true` or `false`"}.get(
        annotation, "a table"
    )
