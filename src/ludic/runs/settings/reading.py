"""Reading a run: its file or name, and overrides, become a checked configuration; or an error that
names the key, the nearest right one, and the line.

Paths are relative to the file, and stored whole. Whether one exists is asked with `os.path`, which
says no to what cannot be a path at all.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ludic.errors import ConfigError
from ludic.plumbing.arguments import near_names
from ludic.runs.settings.base import Section, check_no_secrets, section_of
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
        raise ConfigError(
            f"there is neither a run file {run!r} nor a built-in run of that name "
            f"({builtin_runs()})"
        )
    return load_run(path, overrides), Path.cwd()


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a run file, with `section.key=value` overrides applied."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
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
        problems = [_explain(error, data, text, overridden) for error in exc.errors()]
        raise ConfigError(f"{source}: " + "; ".join(dict.fromkeys(problems))) from exc


def _explain(error: Any, data: Mapping[str, Any], text: str, overridden: Sequence[str]) -> str:
    """Returns what is wrong with one setting: its key, the nearest right one, and the line."""
    path = [str(part) for part in error["loc"]]
    tables = data.get(path[0]) if path else None
    if path[1:2] == ["0"] and not (isinstance(tables, list) and len(tables) > 1):
        path = [path[0], *path[2:]]  # the only one
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        table = [part for part in path[:-1] if not part.isdigit()]
        names = [name for place, name in _all_keys(RunConfig) if place == table]
        near = near_names(path[-1], names) or _elsewhere(path[-1])
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(names))}"
        problem = f"unknown key {key!r}: {hint}"
    elif error["type"] == "missing":
        problem = f"{key!r} is missing"
        if key == "env":
            problem += ': name an environment, as in [env] kind = "tic_tac_toe"'
    else:
        fault, given = error["msg"].removeprefix("Value error, "), error["input"]
        shown = f"{key!r}" if isinstance(given, dict) else f"{key!r} = {given!r}"
        if error["type"] == "literal_error" and isinstance(given, str):
            options = re.findall(r"'([^']*)'", error["ctx"]["expected"])
            near = near_names(given, options)
            fault += f"; did you mean {near[0]!r}?" if near else ""
        problem = f"{shown}: {fault[0].lower()}{fault[1:]}"
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
            here = table
        elif assignment := re.match(r"([A-Za-z0-9_.\"'-]+)\s*=", stripped):
            here = table + [part.strip("\"'") for part in assignment[1].split(".")]
        else:
            continue
        if here == wanted[: len(here)] and (best is None or len(here) > best[0]):
            best = (len(here), number)
    return best[1] if best else None


def override_key(override: str) -> str:
    """Returns the `a.b` of `a.b=value`."""
    key, equals, _ = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", key.strip()):
        raise ConfigError(
            f"override {override!r} is not of the form section.key=value, "
            "for example training.learning_rate=1e-5"
        )
    return key.strip()


def apply_override(data: dict[str, Any], override: str) -> str:
    """Puts `a.b=value` into `data` and returns `a.b`; the value is TOML, or else a string."""
    key, raw = override_key(override), override.partition("=")[2].strip()
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
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


OTHERS = ("reference", "teacher", "player")
_MODELS = [("model", "name"), *((place, key) for place in OTHERS for key in ("model", "tokenizer"))]


def resolve_paths(data: dict[str, Any], folder: Path, overridden: Collection[str] = ()) -> None:
    """Makes the paths in a run's tables absolute. Those of the file are relative to its `folder`,
    or, as once upon a time, to the working directory if they are only there; those that were
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
