"""What episodes are played with, as data: another process makes it again from that.

Factories go by the place they can be imported from, a chat template by its tokenizer and options,
a client by its number, since it stays where it is.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any

from ludic.errors import ConfigError
from ludic.inference.client import ChatClient
from ludic.inference.sampling import InferenceSpec
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.templates.plain_tokenizer import PlainTokenizer
from ludic.inference.templates.tool_parsers import ToolParser
from ludic.interaction.base import Runtime
from ludic.plumbing.given import place_of
from ludic.plumbing.lazy import resolve
from ludic.rollouts.episode_runner import EpisodeRunner
from ludic.types import from_json, to_json

MakeClient = Callable[[int, int | None], ChatClient]
"""Returns the client of a number, with so long a context."""


def described(runner: EpisodeRunner, clients: list[ChatClient]) -> dict[str, Any]:
    """The runner as plain values. Its clients are added to `clients` and stand by their place in
    it. Raises `ConfigError` for what another process could not make again."""
    return {
        "env_registry": _places(runner.env_registry),
        "protocol_registry": _places(runner.protocol_registry),
        "runtime": None if runner.runtime is None else _runtime(runner.runtime, clients),
        "step_timeout_s": runner.step_timeout_s,
        "episode_timeout_s": runner.episode_timeout_s,
        "isolated": sorted(runner.isolated),
    }


def made(description: Mapping[str, Any], client: MakeClient) -> EpisodeRunner:
    """The runner again."""
    runtime = description["runtime"]
    again = {
        "env_registry": _factories(description["env_registry"]),
        "protocol_registry": _factories(description["protocol_registry"]),
        "runtime": None if runtime is None else _made_runtime(runtime, client),
        "isolated": frozenset(description["isolated"]),
    }
    return EpisodeRunner(**{**description, **again})


def _places(registry: Mapping[str, Any] | None) -> dict[str, str] | None:
    if registry is None:
        return None
    places: dict[str, str] = {}
    for name, factory in registry.items():
        if (place := place_of(factory)) is None:
            raise _cannot(f"{name!r} of the registry cannot be imported from any module")
        places[name] = place
    return places


def _factories(places: Mapping[str, str] | None) -> dict[str, Any] | None:
    return None if places is None else {name: resolve(place) for name, place in places.items()}


def _runtime(runtime: Runtime, clients: list[ChatClient]) -> dict[str, Any]:
    if runtime.client not in clients:
        clients.append(runtime.client)
    template = runtime.chat_template
    if type(template) is not HFChatTemplate:
        raise _cannot(f"a chat template of type {type(template).__name__} cannot be described")
    return {
        "client": (clients.index(runtime.client), runtime.client.max_context_tokens),
        "tokenizer": PlainTokenizer.of(template.tokenizer).described(),
        "tool_parser": _place_of_parser(template.tool_parser),
        "options": {**template.options, "today": template.options["today"].isoformat()},
        "model": runtime.model,
        "inference": to_json(runtime.inference),
        "others": {name: _runtime(other, clients) for name, other in runtime.others.items()},
    }


def _made_runtime(description: Mapping[str, Any], client: MakeClient) -> Runtime:
    options, parser = description["options"], description["tool_parser"]
    template = HFChatTemplate(
        PlainTokenizer.from_description(description["tokenizer"]),
        None if parser is None else resolve(parser)(),
        **{**options, "today": dt.date.fromisoformat(options["today"])},
    )
    return Runtime(
        client(*description["client"]),
        template,
        description["model"],
        from_json(InferenceSpec, description["inference"]),
        {name: _made_runtime(other, client) for name, other in description["others"].items()},
    )


def _place_of_parser(parser: ToolParser | None) -> str | None:
    if parser is None:
        return None
    kind: Any = type(parser)
    place = place_of(kind)
    try:
        alike = place is not None and vars(kind()) == vars(parser)
    except TypeError:  # it takes arguments
        alike = False
    if not alike:
        raise _cannot(f"the tool parser {parser!r} cannot be made again without its arguments")
    return place


def _cannot(why: str) -> ConfigError:
    return ConfigError(
        f"what episodes are played with cannot be sent to another process: {why}; play them in "
        "this one, without workers"
    )
