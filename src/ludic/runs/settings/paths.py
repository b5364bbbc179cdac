"""The paths in a run's tables, made absolute, and what a model's name stands for.

Whether a path exists is asked with `os.path`, which says no to what cannot be a path at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

OTHERS = ("reference", "teacher", "player")

_MODELS = [("model", "name"), *((place, key) for place in OTHERS for key in ("model", "tokenizer"))]


def resolve_paths(data: dict[str, Any], folder: Path, overridden: Collection[str] = ()) -> None:
    """Makes the paths in a run's tables absolute. Those of the file are relative to its `folder`,
    or, as in earlier versions, to the working directory if they are only there; those that were
    `overridden` come from the command line, and are relative to the working directory."""

    def resolve(place: str, key: str) -> None:
        for table in _tables(data, place):
            if isinstance(value := table.get(key), str):
                table[key] = str(_placed(value, folder, f"{place}.{key}" in overridden))

    for place, key in (("run", "folder"), ("model", "chat_template"), ("sft", "data")):
        resolve(place, key)
    if any("/" in str(table.get("vllm_python")) for table in _tables(data, "inference")):
        resolve("inference", "vllm_python")  # any other is looked for on the PATH
    for place in ("inference", *OTHERS):
        resolve(place, "api_key_file")
    for place in ("protocol", "eval.protocol"):
        for protocol in _tables(data, place):
            if protocol.get("kind") == "program":
                # A program starts where its run file lies, unless the file says otherwise.
                options = protocol.setdefault("kwargs", {})
                if isinstance(options, dict):
                    options.setdefault("cwd", ".")
                    resolve(f"{place}.kwargs", "cwd")
    for place in ("env.kwargs", "eval.env.kwargs"):
        for options in _tables(data, place):
            for key in ("path", "rom", "game"):
                value = options.get(key)
                if isinstance(value, str) and f"{place}.{key}" not in overridden:
                    path = _placed(value, folder, overridden=False)
                    if os.path.exists(path):  # only an environment knows what else it may be
                        options[key] = str(path)
            if isinstance(states := options.get("states"), list):
                whole = f"{place}.states" in overridden
                options["states"] = [str(_placed(str(s), folder, whole)) for s in states]
    for place, key in _MODELS:
        for table in _tables(data, place):
            if isinstance(value := table.get(key), str):
                name, which = split_run(value)
                path = _placed(name, folder, f"{place}.{key}" in overridden)
                is_path = os.path.isdir(path) or name.startswith((".", "~", "/"))
                if name not in ("tiny", "start") and is_path:
                    table[key] = f"{path}:{which}" if which else str(path)


def _tables(data: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Returns the tables at `a.b`: one, or several where there is a list of them."""
    tables = [data]
    for name in place.split("."):
        below = [table.get(name) for table in tables]
        every = [item for part in below for item in (part if isinstance(part, list) else [part])]
        tables = [item for item in every if isinstance(item, dict)]
    return tables


def _placed(value: str, folder: Path, overridden: bool) -> Path:
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
