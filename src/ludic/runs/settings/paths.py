"""Paths that a run file names: relative to the file, and stored whole.

Whether one exists is asked with `os.path`, which says no to what cannot be a path at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

KEYS = (
    *(("run", "folder"), ("model", "chat_template"), ("sft", "data")),
    ("inference", "vllm_python"),
)
OTHERS = ("reference", "teacher", "player")


def resolve_paths(data: dict[str, Any], folder: Path, overridden: Collection[str] = ()) -> None:
    """Makes the paths in a run's tables absolute. Those of the file are relative to its `folder`,
    or, as once upon a time, to the working directory if they are only there; those that were
    `overridden` come from the command line, and are relative to the working directory."""
    for section, key in KEYS:
        value = data.get(section, {}).get(key) if isinstance(data.get(section), dict) else None
        if isinstance(value, str) and (key != "vllm_python" or "/" in value):
            data[section][key] = str(_found(value, folder, f"{section}.{key}" in overridden))
    for place, table in (("protocol", data), ("eval.protocol", data.get("eval"))):
        part = table.get("protocol") if isinstance(table, dict) else None
        if isinstance(part, dict) and part.get("kind") == "program":
            # A program starts where its run file lies, unless the file says otherwise.
            options = part.setdefault("kwargs", {})
            if isinstance(options, dict) and isinstance(options.setdefault("cwd", "."), str):
                given = f"{place}.kwargs.cwd" in overridden
                options["cwd"] = str(_found(options["cwd"], folder, given))
    for place in ("inference", *OTHERS):
        tables = data.get(place)
        for table in tables if isinstance(tables, list) else [tables]:
            if isinstance(table, dict) and isinstance(table.get("api_key_file"), str):
                given = f"{place}.api_key_file" in overridden
                table["api_key_file"] = str(_found(table["api_key_file"], folder, given))
    for place, table in _envs(data):
        value = table.get("path")
        if isinstance(value, str) and f"{place}.kwargs.path" not in overridden:
            found = _found(value, folder, overridden=False)
            if os.path.exists(found):  # only an environment knows what else its `path` may be
                table["path"] = str(found)
    for place, table, key in _models(data):
        if not isinstance(table, dict) or not isinstance(table.get(key), str):
            continue
        name, which = split_run(table[key])
        path = _found(name, folder, f"{place}.{key}" in overridden)
        is_path = os.path.isdir(path) or name.startswith((".", "~", "/"))
        if name not in ("tiny", "start") and is_path:
            table[key] = f"{path}:{which}" if which else str(path)


def _envs(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the arguments of the run's environments, and the name of their table."""
    held_out = data.get("eval")
    places = {"env": data.get("env")}
    places["eval.env"] = held_out.get("env") if isinstance(held_out, dict) else None
    for place, tables in places.items():
        for table in tables if isinstance(tables, list) else [tables]:
            if isinstance(table, dict) and isinstance(table.get("kwargs"), dict):
                yield place, table["kwargs"]


def _models(data: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yields where models stand: the name of the table, the table, and its key."""
    yield "model", data.get("model"), "name"
    for place in OTHERS:
        tables = data.get(place)
        for table in tables if isinstance(tables, list) else [tables]:
            yield place, table, "model"
            yield place, table, "tokenizer"


def _found(value: str, folder: Path, overridden: bool) -> Path:
    value = os.path.expanduser(value)
    here, there = Path(value).absolute(), (folder / value).absolute()
    return here if overridden or (os.path.exists(here) and not os.path.exists(there)) else there


def split_run(name: str) -> tuple[str, str | None]:
    """Splits `first:sft` and `first:step-40` into the run's folder and which model of it."""
    match = re.fullmatch(r"(.+):(sft|rl|step-\d+)", name)
    return (match[1], match[2]) if match else (name, None)


def earlier_run(name: str) -> tuple[Path, str | None] | None:
    """Returns the run folder that `model.name` stands for, and which of its models; None if it is
    none."""
    path, which = split_run(name)
    return (Path(path), which) if which or os.path.isfile(Path(path) / "run.json") else None
