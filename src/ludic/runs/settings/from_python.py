"""A run from Python: arguments and objects become the tables that a run file would have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, structs
from pydantic import BaseModel

from ludic.errors import ConfigError
from ludic.plumbing.arguments import unknown_argument
from ludic.plumbing.given import PREFIX, is_given, place_of, recipe_of, unplaced_name
from ludic.registry import (
    AGENTS,
    ALGORITHMS,
    BOTS,
    CONTEXTS,
    CORRECTIONS,
    ENVS,
    FILTERS,
    LOGGERS,
    PARSERS,
    PROTOCOLS,
    Registry,
)
from ludic.types import EnvSpec, ProtocolSpec

SECTIONS = (
    *("run", "model", "inference", "env", "protocol", "algorithm"),
    *("reference", "teacher", "player", "curriculum", "training", "pipeline"),
    *("sft", "eval", "logging"),
)
SHORTCUTS = {
    "parser": ("protocol", "kwargs", "parser"),
    "steps": ("training", "steps"),
    "learning_rate": ("training", "learning_rate"),
    "seed": ("run", "seed"),
    "name": ("run", "name"),
}

PARTS = {"agent": AGENTS, "bot": BOTS, "context": CONTEXTS}
"""Arguments of a protocol or a seat that name a part."""


class Tables:
    """The tables of a run, and the objects among its parts that have no name to be recorded by."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}

    def put(self, **arguments: Any) -> None:
        """Takes a run's sections and shortcuts; a shortcut goes before its section."""
        for name, value in arguments.items():
            if value is None:
                continue
            if name in SECTIONS:
                self.data[name] = self._section(name, value)
        for name, path in SHORTCUTS.items():
            if (value := arguments.get(name)) is not None:
                table = self.data
                for key in path[:-1]:
                    table = table.setdefault(key, {})
                table[path[-1]] = self._parser(value) if name == "parser" else value
        unknown = arguments.keys() - set(SECTIONS) - set(SHORTCUTS)
        if unknown:
            raise ConfigError(f"a run: {unknown_argument(min(unknown), [*SHORTCUTS, *SECTIONS])}")

    def _section(self, name: str, value: Any) -> Any:
        match name:
            case "env":
                return self._envs(value)
            case "model":
                return self._model(value)
            case "algorithm":
                return self._algorithm(value)
            case "protocol":
                return self._protocol(value)
            case "reference":
                return self._other(name, value)
            case "teacher" | "player":
                return [
                    self._other(name, v) for v in (value if isinstance(value, list) else [value])
                ]
        table = _table(name, value)
        if name == "training" and table.get("filters"):
            table["filters"] = [self._filter(entry) for entry in table["filters"]]
        if name == "logging" and table.get("loggers"):
            table["loggers"] = [self._logger(entry) for entry in table["loggers"]]
        if name == "sft" and callable(table.get("teacher")):
            table["teacher"] = self._named(table["teacher"])
        if name == "eval":
            if table.get("env"):
                table["env"] = self._envs(table["env"])
            if table.get("protocol"):
                table["protocol"] = self._protocol(table["protocol"])
        return table

    def _envs(self, value: Any) -> list[dict[str, Any]]:
        """A class, a factory, a name, a spec or a table; or several, as a list (of those, or of
        pairs with a weight) or as a mapping to weights."""
        if isinstance(value, Mapping) and "kind" not in value:
            value = list(value.items())
        several = isinstance(value, list)
        found = []
        for entry in value if several else [value]:
            env, weight = entry if isinstance(entry, tuple) else (entry, None)
            table = self._env(env)
            found.append(table if weight is None else {**table, "weight": weight})
        return found

    def _env(self, env: Any) -> dict[str, Any]:
        if isinstance(env, str):
            return {"kind": env}
        if isinstance(env, EnvSpec):
            env = {"kind": env.kind, "kwargs": dict(env.kwargs)}
        elif isinstance(env, partial) and not env.args:
            env = {"kind": env.func, "kwargs": dict(env.keywords)}
        elif not isinstance(env, Mapping | BaseModel):
            if not callable(env):
                raise ConfigError(
                    f"env={env!r} is no environment to make: give its class, a function that "
                    "returns one, a name, an EnvSpec, or a list of those"
                )
            env = {"kind": env}
        table = _table("env", env)
        kind, kwargs = table.get("kind"), table.get("kwargs") or {}
        if kwargs and not _is_json(kwargs):
            make = kind if callable(kind) else ENVS.get(str(kind))
            table |= {"kind": self._give(partial(make, **kwargs), make), "kwargs": {}}
        elif callable(kind):
            table["kind"] = self._named(kind, ENVS)
        return table

    def _model(self, value: Any) -> dict[str, Any]:
        if isinstance(value, tuple):
            return {"name": self._pair(value)}
        if isinstance(value, str | Path):
            return {"name": str(value)}
        table = _table("model", value)
        if isinstance(table.get("name"), tuple):
            table["name"] = self._pair(table["name"])
        return table

    def _other(self, name: str, value: Any) -> dict[str, Any]:
        """Another model: its name, a loaded pair, or a table."""
        if isinstance(value, str | Path) and str(value).startswith(("http://", "https://")):
            return {"server": str(value)}
        named = isinstance(value, str | Path | tuple)
        table: dict[str, Any] = {"model": value} if named else _table(name, value)
        if isinstance(table.get("model"), tuple):
            table["model"] = self._pair(table["model"])
        elif isinstance(table.get("model"), Path):
            table["model"] = str(table["model"])
        return table

    def _filter(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self._part(value, FILTERS)
        return (place_of(value) or self._give(value, value)) if callable(value) else value

    def _logger(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self._part(value, LOGGERS)
        if hasattr(value, "log") and not isinstance(value, type):
            raise ConfigError(
                f"logging.loggers: {value!r} is a logger already: give its class, or a function "
                "that makes one for each stage; or set run.loggers = [logger] before run.go()"
            )
        return self._named(value, LOGGERS) if callable(value) else value

    def _correction(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self._part(value, CORRECTIONS)
        if not is_dataclass(value) or isinstance(value, type):
            return value
        arguments = {field.name: getattr(value, field.name) for field in fields(value)}
        kind = self._named(type(value), CORRECTIONS)
        return {"kind": kind, **{k: v for k, v in arguments.items() if v is not None}}

    def _pair(self, value: tuple[Any, ...]) -> str:
        if len(value) != 2 or not hasattr(value[0], "parameters"):
            raise ConfigError("model=(…): a loaded model is given as the pair (model, tokenizer)")
        return self._give(value, value[0])

    def _algorithm(self, value: Any) -> dict[str, Any]:
        if isinstance(value, str):
            return {"name": value}
        if recipe := recipe_of(value):
            name, kwargs = recipe
            kwargs = {key: _plain(argument) for key, argument in kwargs.items()}
            if _is_json(kwargs):
                return {"name": name, "kwargs": kwargs}
        if hasattr(value, "credit_assigner"):
            return {"name": self._give(lambda: value, value)}
        if callable(value):
            return {"name": self._named(value, ALGORITHMS)}
        if isinstance(value, Mapping) and "name" in value:
            rest = {k: v for k, v in value.items() if k != "name"}
            table = self._algorithm(value["name"]) | _table("algorithm", rest)
        else:
            table = _table("algorithm", value)
        if table.get("corrections"):
            table["corrections"] = [self._correction(c) for c in table["corrections"]]
        return table

    def _protocol(self, value: Any) -> dict[str, Any]:
        if isinstance(value, str):
            return {"kind": value}
        if isinstance(value, ProtocolSpec):
            value = {"kind": value.kind, "kwargs": dict(value.kwargs)}
        elif callable(value) and not isinstance(value, Mapping):
            value = {"kind": value}
        table = self._part(_table("protocol", value), PROTOCOLS)
        if table.get("kwargs"):
            table["kwargs"] = self._agent(table["kwargs"])
        return table

    def _agent(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a protocol or a seat, with names in the place of objects."""
        found = dict(options)
        for key, value in options.items():
            if key == "parser":
                found[key] = self._parser(value)
            elif key == "tools":
                found[key] = [self._named(tool) if callable(tool) else tool for tool in value]
            elif key in ("seats", "sub_agents"):
                found[key] = {name: self._agent(seat) for name, seat in value.items()}
            elif key == "context" and isinstance(value, Mapping):
                found[key] = self._part(value, CONTEXTS)
            elif key in PARTS and callable(value):
                found[key] = self._named(value, PARTS[key])
            elif callable(value):
                found[key] = self._named(value)
        return found

    def _parser(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._parser(part) for part in value]
        if isinstance(value, Mapping):
            return self._part(value, PARSERS)
        if not callable(value):
            return value
        if recipe := recipe_of(value):
            name, kwargs = recipe
            if name == "compose":
                return [self._parser(part) for part in kwargs["parsers"]]
            return {"kind": name, **{key: _plain(argument) for key, argument in kwargs.items()}}
        return {"kind": self._give(lambda: value, value)}

    def _part(self, table: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
        """A table with a "kind", by name."""
        kind = table.get("kind")
        return {**table, "kind": self._named(kind, registry)} if callable(kind) else dict(table)

    def _named(self, thing: Any, registry: Registry | None = None) -> str:
        builtin = registry.builtin_name(thing) if registry is not None else None
        return builtin or place_of(thing) or self._give(thing, thing)

    def _give(self, thing: Any, called: Any) -> str:
        """Keeps an object, and returns its name: that of `called`, numbered if it is taken."""
        wanted = name = unplaced_name(called)
        number = 1
        while name in self.objects and self.objects[name] is not thing:
            number += 1
            name = f"{wanted}-{number}"
        self.objects[name] = thing
        return name


def given_names(data: Any, path: str = "") -> dict[str, str]:
    """Returns where in a run's tables objects without a name stand: their paths, and names."""
    if is_given(data):
        return {path: data}
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(data, Mapping):
        items = list(data.items())
    elif isinstance(data, list):
        items = list(enumerate(data))
    found: dict[str, str] = {}
    for key, value in items:
        found |= given_names(value, f"{path}.{key}" if path else str(key))
    return found


def at(data: Any, path: str) -> Any:
    """Returns what stands at `a.0.b` of a run's tables; None where there is nothing."""
    for key in path.split("."):
        try:
            data = data[int(key)] if isinstance(data, list) else data[key]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return data


def key_of(name: str) -> str:
    """The part of a name that seeds may depend on: the same for an object as for its place."""
    return name.removeprefix(PREFIX)


def _table(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True)
    if _has_fields(value):
        return _changed(value)
    if isinstance(value, Mapping):
        return {str(key): _setting(setting) for key, setting in value.items()}
    raise ConfigError(f"{name}={value!r}: give a dict of its settings")


def _has_fields(value: Any) -> bool:
    return isinstance(value, Struct) or (is_dataclass(value) and not isinstance(value, type))


def _changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass (`TrainerConfig`) or record (`SamplingConfig`) that were set."""
    defaults: Mapping[str, Any] = {
        field.name: field.default
        for field in (structs.fields if isinstance(value, Struct) else fields)(value)
    }
    stated = {name: getattr(value, name) for name in defaults}
    return {name: stated[name] for name in defaults if stated[name] != defaults[name]}


def _setting(value: Any) -> Any:
    if _has_fields(value) and not hasattr(value, "coefficients"):
        return value if isinstance(value, EnvSpec | ProtocolSpec) else _changed(value)
    if isinstance(value, Mapping):
        return dict(value)  # a shortcut may be put into it
    return str(value) if isinstance(value, Path) else value


def _plain(value: Any) -> Any:
    """A preset's argument as JSON: an aggregation by its name, a tuple as a list."""
    if isinstance(value, tuple):
        return list(value)
    if hasattr(value, "coefficients") and is_dataclass(value) and not isinstance(value, type):
        from ludic.training.losses.aggregation import describe_aggregation

        return describe_aggregation(value)
    return value


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
