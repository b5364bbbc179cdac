"""What a run and the processes that play its episodes tell each other.

A record travels inside a message as bytes of its own, so that one that cannot be read costs what it
is about, and not the messages beside it. Errors go by type and text, since their constructors
differ.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ludic import errors
from ludic.errors import LudicError
from ludic.plumbing.text import error_text, words_of
from ludic.types import from_json, to_json

T = TypeVar("T")


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
    """Returns a record as it travels; `SerializationError` for what would come back changed."""
    return to_json(record)


def unpack(cls: type[T], data: bytes) -> T:
    """The inverse of `pack`; `SerializationError` names the field at fault."""
    return from_json(cls, data)


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
