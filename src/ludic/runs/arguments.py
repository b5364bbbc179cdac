"""The arguments of a run in a script: the configuration they stand for, and their objects."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError
from ludic.plumbing.given import is_given
from ludic.plumbing.lazy import resolve
from ludic.registry import ENVS
from ludic.runs.settings import RunConfig, check_run
from ludic.runs.settings.from_python import Tables, at, given_names
from ludic.runs.settings.paths import resolve_paths

PARTS = (
    *("env", "model", "algorithm", "parser", "protocol", "reference", "teacher", "player"),
    *("training", "sft", "eval"),
)
"""The arguments that may hold Python objects, and are given again when the run is resumed."""


def read_arguments(arguments: Mapping[str, Any]) -> tuple[RunConfig, dict[str, Any]]:
    """Returns the configuration that a run's arguments stand for, and the objects among them."""
    tables = Tables()
    tables.put(**arguments)
    resolve_paths(tables.data, Path.cwd())
    return check_run(tables.data, source="the run"), tables.objects


def given_again(config: RunConfig, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects of a recorded run by their recorded names, from parts that are given
    again where they stood."""
    for name in parts:
        if name not in PARTS:
            raise ConfigError(
                f"{name}= cannot be given here: the run has it in its folder; give only parts that "
                f"were Python objects ({', '.join(PARTS)})"
            )
    tables = Tables()
    tables.put(**parts)
    found: dict[str, Any] = {}
    recorded = config.plain()
    for path, name in given_names(recorded).items():
        again = at(tables.data, path)
        if again is None:
            continue  # whoever goes on without it says so
        if is_given(again):
            found[name] = tables.objects[again]
        elif isinstance(again, str) and (":" in again or path.startswith(("env.", "eval.env."))):
            found[name] = resolve(again) if ":" in again else ENVS.get(again)
        else:
            raise ConfigError(f"{path} was a Python object: give it again, and not {again!r}")
    return found


def script_folder() -> Path:
    """Returns the folder of the running script, whose modules a run may name; in a notebook, the
    working directory."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).resolve().parent if script else Path.cwd()
