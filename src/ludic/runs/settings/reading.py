"""Reading a run: its file or name, and overrides, become a checked configuration; or an error that
names the key, the nearest right one, and the line.

Paths are relative to the file, and stored whole.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ludic.errors import ConfigError, near_names
from ludic.runs.settings.base import check_no_secrets, explain_problem
from ludic.runs.settings.paths import resolve_paths
from ludic.runs.settings.run import SCHEMA, RunConfig

_BUILTIN = Path(__file__).parent.parent / "files"


def builtin_runs() -> str:
    """Returns the names of the built-in runs, for a message."""
    return ", ".join(sorted(path.stem for path in _BUILTIN.glob("*.toml")))


def builtin_run(name: str) -> Path:
    """Returns where the file of a built-in run is, if there is one of that name."""
    return _BUILTIN / f"{name.replace('_', '-')}.toml"


def find_run(run: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path]:
    """Reads a run by its file or built-in name; also returns the folder of its modules."""
    path = Path(run)
    if path.suffix == ".toml" or os.path.exists(path):
        return load_run(path, overrides), path.resolve().parent
    path = builtin_run(run)
    if not os.path.isfile(path):
        there = [*Path().glob("*.toml"), *(file.parent for file in Path().glob("*/run.json"))]
        near = near_names(run, [*builtin_runs().split(", "), *map(str, there)])
        raise ConfigError(
            f"there is no run file or run folder {run!r}, and no built-in run of that name "
            f"({builtin_runs()})" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return load_run(path, overrides), Path.cwd()


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a run file, with `section.key=value` overrides applied."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except IsADirectoryError as exc:
        resumed = f"resume it with `ludic train --resume {path}`, or take model.name={path}"
        hint = resumed if (path / "run.json").is_file() else "name the run file in it"
        raise ConfigError(f"{path} is a folder and not a run file: {hint}") from exc
    except OSError as exc:
        raise ConfigError(f"cannot read the run file {path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not a text file in UTF-8") from exc
    return parse_run(text, overrides, source=str(path), folder=path.absolute().parent)


def parse_run(
    text: str, overrides: Sequence[str] = (), source: str = "run file", folder: Path | None = None
) -> RunConfig:
    """As `load_run`, from the text itself. Paths are taken from `folder`, if one is given."""
    try:
        data = tomllib.loads(text)
    except RecursionError as exc:
        raise _too_deep(source) from exc
    except ValueError as exc:  # not only a TOMLDecodeError: a number may have too many digits
        raise ConfigError(f"{source} is not valid TOML: {exc}") from exc
    overridden = [apply_override(data, override) for override in overrides]
    if folder is not None:
        resolve_paths(data, folder, overridden)
    return check_run(data, text, source, overridden)


def _too_deep(source: str) -> ConfigError:
    return ConfigError(f"{source} is nested too deeply: a run has tables of a few levels")


def check_run(
    data: Mapping[str, Any],
    text: str = "",
    source: str = "run file",
    overridden: Sequence[str] = (),
) -> RunConfig:
    """Validates a run's tables; errors name the line of `text` where there is one."""
    version = data.get("schema", SCHEMA)
    if isinstance(version, int) and version > SCHEMA:
        raise ConfigError(
            f"{source} has schema {version}; this version of Ludic reads up to {SCHEMA}: "
            "update your clone of it"
        )
    try:
        check_no_secrets(data, source)
        return RunConfig.model_validate(data)
    except RecursionError as exc:
        raise _too_deep(source) from exc
    except ValidationError as exc:
        problems = [explain_problem(RunConfig, e, data, text, overridden) for e in exc.errors()]
        raise ConfigError(f"{source}: " + "; ".join(dict.fromkeys(problems))) from exc


def override_key(override: str) -> str:
    """Returns the `a.b` of `a.b=value`."""
    key, equals, _ = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", key.strip()):
        raise ConfigError(
            f"override {override!r} is not of the form section.key=value, "
            "such as training.learning_rate=1e-5"
        )
    return key.strip()


def apply_override(data: dict[str, Any], override: str) -> str:
    """Puts `a.b=value` into `data` and returns `a.b`; the value is TOML, or else a string."""
    key, raw = override_key(override), override.partition("=")[2].strip()
    try:
        # In braces a `#` begins no comment that is left out without a word.
        value = tomllib.loads(f"table = {{value = {raw}}}")["table"]["value"]
    except RecursionError as exc:
        raise _too_deep(f"override {key!r}") from exc
    except ValueError:
        value = _spoken(raw)
    *tables, last = key.split(".")
    table: Any = data
    for name in tables:
        table = table.setdefault(name, {})
        if isinstance(table, list) and len(table) == 1:
            table = table[0]  # a mix of one environment, as a resolved run has it
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {name!r} is not a table")
    table[last] = value
    return key


def _spoken(raw: str) -> Any:
    """What TOML does not read: `True`, `.5` and `1.` as Python has them, and bare words."""
    if raw in ("True", "False"):
        return raw == "True"
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?", raw):
        return float(raw)
    return raw
