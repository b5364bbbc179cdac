"""A run from Python: arguments and objects become the tables that a run file would have.

Where a run file names a part, a script may give the part itself. It is recorded by its name if it
is built in, as it was made if a preset or a built-in parser made it, by its place if it can be
imported, and otherwise as an object, which is given again when the run is resumed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, structs
from pydantic import BaseModel

from ludic import registry
from ludic.errors import ConfigError
from ludic.inference.sampling import SamplingConfig
from ludic.plumbing.arguments import unknown_argument
from ludic.plumbing.given import is_given, place_of, recipe_of, unplaced_name
from ludic.plumbing.lazy import resolve
from ludic.registry import CORRECTIONS, ENVS, Registry
from ludic.runs.settings.base import settings_in
from ludic.runs.settings.paths import resolve_paths
from ludic.runs.settings.reading import check_run
from ludic.runs.settings.run import RunConfig

REGISTRIES = [table for table in vars(registry).values() if isinstance(table, Registry)]
SECTIONS = [name for name in RunConfig.model_fields if name != "schema_version"]
SHORTCUTS = {
    "parser": ("protocol", "kwargs", "parser"),
    "steps": ("training", "steps"),
    "learning_rate": ("training", "learning_rate"),
    "seed": ("run", "seed"),
    "name": ("run", "name"),
}
PARTS = (
    *("env", "model", "algorithm", "parser", "protocol", "reference", "teacher", "player"),
    *("training", "sft", "eval"),
)
"""The arguments that may hold Python objects, and are given again when the run is resumed."""


def read_arguments(arguments: Mapping[str, Any]) -> tuple[RunConfig, dict[str, Any]]:
    """Returns the configuration that a run's arguments stand for, and the objects among them."""
    tables = Tables(arguments)
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
    tables = Tables(parts)
    settings = dict(settings_in(tables.data))
    objects: dict[str, Any] = {}
    for path, name in given_names(config.plain()).items():
        again = settings.get(path)
        if again is None:
            continue  # whoever needs it says so
        if is_given(again):
            objects[name] = tables.objects[again]
        elif isinstance(again, str) and (":" in again or path.startswith(("env.", "eval.env."))):
            objects[name] = resolve(again) if ":" in again else ENVS.get(again)
        else:
            raise ConfigError(f"{path} was a Python object: give it again, and not {again!r}")
    return objects


def script_folder() -> Path:
    """Returns the folder of the running script, whose modules a run may name; in a notebook, the
    working directory."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).resolve().parent if script else Path.cwd()


class Tables:
    """The tables of a run, from its sections and shortcuts, and the objects that have no name to be
    recorded by. A shortcut goes before its section."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.data: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        stated = {name: value for name, value in arguments.items() if value is not None}
        if unknown := stated.keys() - {*SECTIONS, *SHORTCUTS}:
            raise ConfigError(f"a run: {unknown_argument(min(unknown), [*SHORTCUTS, *SECTIONS])}")
        for name in stated.keys() & set(SECTIONS):
            self.data[name] = self._section(name, stated[name])
        for name, (*tables, key) in SHORTCUTS.items():
            if name in stated:
                table = self.data
                for step in tables:
                    table = table.setdefault(step, {})
                table[key] = self._parser(stated[name]) if name == "parser" else stated[name]

    def _section(self, name: str, value: Any) -> Any:
        match name:
            case "env":
                return self._envs(value)
            case "model":
                return self._model(name, "name", value)
            case "reference":
                return self._model(name, "model", value)
            case "teacher" | "player":
                several = value if isinstance(value, list) else [value]
                return [self._model(name, "model", one) for one in several]
            case "algorithm":
                return self._algorithm(value)
            case "protocol" if isinstance(value, str) or callable(value):
                value = {"kind": value}
            case "eval" if isinstance(value, Mapping):
                parts = {k: self._section(k, value[k]) for k in ("env", "protocol") if value.get(k)}
                value = {**value, **parts}
            case "logging" if isinstance(value, Mapping):
                for logger in value.get("loggers") or ():
                    if hasattr(logger, "log") and not isinstance(logger, type):
                        raise ConfigError(
                            f"logging.loggers: {logger!r} is a logger already: give its class, or "
                            "a function that makes one for each stage; or set run.loggers = "
                            "[logger] before run.go()"
                        )
        return self._table(name, value)

    def _table(self, name: str, value: Any) -> dict[str, Any]:
        table = self._plain(value)
        if not isinstance(table, dict):
            raise ConfigError(f"{name}={value!r}: give a dict of its settings")
        return table

    def _plain(self, value: Any) -> Any:
        """Returns a setting as a run file has it, with names in the place of objects."""
        value = _described(value)
        if isinstance(value, Mapping):
            return {
                str(key): self._parser(item) if key == "parser" else self._plain(item)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        return self._named(value) if callable(value) else value

    def _envs(self, value: Any) -> list[dict[str, Any]]:
        """A class, a factory, a name, a spec or a table; or several, as a list (of those, or of
        pairs with a weight) or as a mapping to weights."""
        if isinstance(value, Mapping) and "kind" not in value:
            value = list(value.items())
        tables = []
        for entry in value if isinstance(value, list) else [value]:
            env, weight = entry if isinstance(entry, tuple) else (entry, None)
            tables.append(self._env(env) | ({} if weight is None else {"weight": weight}))
        return tables

    def _env(self, env: Any) -> dict[str, Any]:
        if isinstance(env, partial) and not env.args:
            table: Any = {"kind": env.func, "kwargs": env.keywords}
        elif isinstance(env, str) or callable(env):
            table = {"kind": env}
        else:
            table = _described(env)
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"env={env!r} is not an environment: give its class, a function that "
                "returns one, a name, an EnvSpec, or a list of those"
            )
        kind, kwargs = table.get("kind"), table.get("kwargs") or {}
        if not _is_json(kwargs):
            make = kind if callable(kind) else ENVS.get(str(kind))
            return {**table, "kind": self._give(partial(make, **kwargs), make), "kwargs": {}}
        return {**table, "kind": self._named(kind)} if callable(kind) else dict(table)

    def _model(self, name: str, key: str, value: Any) -> dict[str, Any]:
        """A model: its name, a loaded pair or a table; if it is not trained, also an address."""
        if isinstance(value, str | Path | tuple):
            is_address = key == "model" and str(value).startswith(("http://", "https://"))
            value = {"server" if is_address else key: value}
        pair = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(pair, tuple):
            if len(pair) != 2 or not hasattr(pair[0], "parameters"):
                raise ConfigError(
                    "model=(…): a loaded model is given as the pair (model, tokenizer)"
                )
            value = {**value, key: self._give(pair, pair[0])}
        return self._table(name, value)

    def _algorithm(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            rest = {key: item for key, item in value.items() if key != "name"}
            named = self._algorithm(value["name"]) if "name" in value else {}
            return named | self._table("algorithm", rest)
        if recipe := recipe_of(value):
            name, kwargs = recipe
            kwargs = {key: _described(argument) for key, argument in kwargs.items()}
            if _is_json(kwargs):
                return {"name": name, "kwargs": kwargs}
        if hasattr(value, "credit_assigner"):
            return {"name": self._give(lambda: value, value)}
        if isinstance(value, str) or callable(value):
            return {"name": self._plain(value)}
        return self._table("algorithm", value)

    def _parser(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._parser(part) for part in value]
        if not callable(value):
            return self._plain(value)
        if recipe := recipe_of(value):
            name, kwargs = recipe
            if name == "compose":
                return [self._parser(part) for part in kwargs["parsers"]]
            return {"kind": name, **{key: _described(item) for key, item in kwargs.items()}}
        return {"kind": self._give(lambda: value, value)}

    def _named(self, thing: Any) -> str:
        names = (table.builtin_name(thing) for table in REGISTRIES)
        return next(filter(None, names), None) or place_of(thing) or self._give(thing, thing)

    def _give(self, thing: Any, called: Any) -> str:
        """Keeps an object, and returns its name: that of `called`, numbered if it is taken."""
        wanted = name = unplaced_name(called)
        number = 1
        while name in self.objects and self.objects[name] is not thing:
            number += 1
            name = f"{wanted}-{number}"
        self.objects[name] = thing
        return name


def given_names(tables: Mapping[str, Any]) -> dict[str, str]:
    """Returns where in a run's tables objects without a name stand: their paths, and names."""
    return {path: value for path, value in settings_in(tables) if is_given(value)}


def _described(value: Any) -> Any:
    """Returns what a run file has in the place of an object that says all about itself: a section,
    a spec, an aggregation, a correction, the settings of a trainer, a path."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True)
    if isinstance(value, Struct):
        defaults = {field.name: field.default for field in structs.fields(value)}
        # A run's own default is a number of tokens, where that of the object is no limit.
        kept = "max_tokens" if isinstance(value, SamplingConfig) else None
        return {k: v for k, v in structs.asdict(value).items() if v != defaults[k] or k == kept}
    if not is_dataclass(value) or callable(value):
        return value
    if hasattr(value, "coefficients"):
        from ludic.training.losses.aggregation import describe_aggregation

        return describe_aggregation(value)
    stated = {field.name: getattr(value, field.name) for field in fields(value)}
    if hasattr(value, "factors"):
        kind = CORRECTIONS.builtin_name(type(value)) or place_of(type(value))
        return {"kind": kind, **{key: item for key, item in stated.items() if item is not None}}
    return {f.name: stated[f.name] for f in fields(value) if stated[f.name] != f.default}


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
