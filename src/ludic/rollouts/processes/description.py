"""What episodes are played with, as data: another process makes it again from that.

Factories go by the place they can be imported from, a chat template by its tokenizer and options,
a client by its number, since it stays where it is.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

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


class RuntimeDescription(msgspec.Struct, frozen=True):
    """A `Runtime`: its client by number, its template by what it is made from."""

    client: int
    max_context_tokens: int | None
    tokenizer: dict[str, Any]
    tool_parser: str | None
    template: dict[str, Any]
    model: str
    inference: bytes
    others: dict[str, RuntimeDescription]


class RunnerDescription(msgspec.Struct, frozen=True):
    """An `EpisodeRunner`; registries map names to places."""

    envs: dict[str, str] | None
    protocols: dict[str, str] | None
    runtime: RuntimeDescription | None
    step_timeout_s: float | None
    episode_timeout_s: float | None
    isolated: list[str]


def described(runner: EpisodeRunner, clients: list[ChatClient]) -> RunnerDescription:
    """The runner as plain values. Its clients are added to `clients` and stand by their place in
    it. Raises `ConfigError` for what another process could not make again."""
    return RunnerDescription(
        _places(runner.env_registry),
        _places(runner.protocol_registry),
        None if runner.runtime is None else _runtime(runner.runtime, clients),
        runner.step_timeout_s,
        runner.episode_timeout_s,
        sorted(runner.isolated),
    )


def made(description: RunnerDescription, client: MakeClient) -> EpisodeRunner:
    """The runner again."""
    return EpisodeRunner(
        _factories(description.envs),
        _factories(description.protocols),
        None if description.runtime is None else _made_runtime(description.runtime, client),
        description.step_timeout_s,
        description.episode_timeout_s,
        frozenset(description.isolated),
    )


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


def _runtime(runtime: Runtime, clients: list[ChatClient]) -> RuntimeDescription:
    if runtime.client not in clients:
        clients.append(runtime.client)
    template = runtime.chat_template
    if type(template) is not HFChatTemplate:
        raise _cannot(f"a chat template of type {type(template).__name__} cannot be described")
    options = dict(template.options)
    return RuntimeDescription(
        clients.index(runtime.client),
        runtime.client.max_context_tokens,
        PlainTokenizer.of(template.tokenizer).described(),
        _place_of_parser(template.tool_parser),
        {**options, "today": options["today"].isoformat()},
        runtime.model,
        to_json(runtime.inference),
        {name: _runtime(other, clients) for name, other in runtime.others.items()},
    )


def _made_runtime(description: RuntimeDescription, client: MakeClient) -> Runtime:
    options = dict(description.template)
    template = HFChatTemplate(
        PlainTokenizer.from_description(description.tokenizer),
        None if description.tool_parser is None else resolve(description.tool_parser)(),
        **{**options, "today": dt.date.fromisoformat(options["today"])},
    )
    return Runtime(
        client(description.client, description.max_context_tokens),
        template,
        description.model,
        from_json(InferenceSpec, description.inference),
        {name: _made_runtime(other, client) for name, other in description.others.items()},
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
