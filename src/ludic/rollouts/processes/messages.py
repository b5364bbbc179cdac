"""What a run and the processes that play its episodes tell each other.

A record travels inside a message as bytes of its own, so that one that cannot be read costs what it
is about, and not the messages beside it. Errors go by type and text, since their constructors
differ. What episodes are played with goes as a description, from which the other process makes it
again: factories by the place they can be imported from, a chat template by its tokenizer and
options, a client by its number, since it stays where it is.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from ludic import errors
from ludic.errors import ConfigError, LudicError, SerializationError
from ludic.inference.client import ChatClient
from ludic.inference.sampling import InferenceSpec
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.templates.plain_tokenizer import PlainTokenizer
from ludic.inference.templates.tool_parsers import ToolParser
from ludic.interaction.base import Runtime
from ludic.plumbing.given import place_of
from ludic.plumbing.lazy import resolve
from ludic.plumbing.records import ready
from ludic.plumbing.text import error_text, words_of
from ludic.rollouts.episode_runner import EpisodeRunner
from ludic.types import from_json, to_json

T = TypeVar("T")
MakeClient = Callable[[int, int | None], ChatClient]
"""Returns the client of a number, with so long a context."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`number` is that of an episode or of a question, by whoever began it."""

    number: int


class Runner(Message, frozen=True):
    """What later episodes are played with."""

    description: dict[str, Any]


class Play(Message, frozen=True):
    """An episode to play, with which runner; `encode`: for a file, too."""

    runner: int
    episode: bytes
    max_steps: int
    encode: bool


class Played(Message, frozen=True):
    """How an episode ended: with rollouts, lost with a reason, or in an error of configuration."""

    rollouts: list[bytes] = []
    lines: list[bytes] = []
    lost: str | None = None
    error: tuple[str, str] | None = None


class Ask(Message, frozen=True):
    """A completion that a client is asked for."""

    client: int
    request: bytes


class Answer(Message, frozen=True):
    """The completion, or the error."""

    response: bytes = b""
    error: tuple[str, str] | None = None


class Cancel(Message, frozen=True):
    """Whoever began an episode or asked a question does not wait for it any more."""


class Ready(Message, frozen=True):
    """Everything is imported, or `problem` says why it cannot be."""

    problem: str | None = None


ToWorker = Runner | Play | Answer | Cancel
FromWorker = Ready | Ask | Played | Cancel


def pack(record: Any) -> bytes:
    """Returns a record as it travels: msgpack; JSON where that has more (whole numbers beyond 64
    bits), which also says what is wrong. Raises `SerializationError` for what cannot be sent."""
    try:
        return msgspec.msgpack.encode(record)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return to_json(record)


def pack_exactly(record: Any) -> bytes:
    """The same; also refuses what would come back changed, such as a tuple for a list."""
    data = pack(record)
    return data if unpack(type(record), data) == record else to_json(record)


def unpack(cls: type[T], data: bytes) -> T:
    """The inverse of `pack`; `SerializationError` names the field at fault."""
    if data.startswith(b"{"):  # no record begins so in msgpack
        return from_json(cls, data)
    try:
        return msgspec.msgpack.decode(data, type=ready(cls))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SerializationError(f"cannot read {cls.__name__}: {exc}") from None


def sent_error(error: BaseException) -> tuple[str, str]:
    """An error as it travels; what is not Ludic's own becomes text."""
    name = type(error).__name__
    ours = getattr(errors, name, None) is type(error)
    return (name, words_of(error)) if ours else ("LudicError", error_text(error))


def raised_error(sent: tuple[str, str]) -> LudicError:
    """The error that `sent_error` took apart, without what only its constructor knew."""
    kind = getattr(errors, sent[0], LudicError)
    kind = kind if isinstance(kind, type) and issubclass(kind, LudicError) else LudicError
    error: LudicError = kind.__new__(kind, sent[1])
    error.args = sent[1:]
    return error


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
