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
from ludic.rollouts.processes.description import RunnerDescription
from ludic.types import from_json, to_json

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`number` is that of an episode or of a question, by whoever began it."""


class Begin(Message, frozen=True):
    imports: tuple[str, ...]


class Runner(Message, frozen=True):
    number: int
    runner: RunnerDescription


class Play(Message, frozen=True):
    number: int
    runner: int
    episode: bytes
    max_steps: int
    encode: bool


class Stop(Message, frozen=True):
    number: int


class Answer(Message, frozen=True):
    number: int
    response: bytes


class Refusal(Message, frozen=True):
    number: int
    error: tuple[str, str]


class Ready(Message, frozen=True):
    """Everything is imported; or `problem` says why it cannot be."""

    problem: str | None = None


class Ask(Message, frozen=True):
    number: int
    client: int
    request: bytes


class Withdraw(Message, frozen=True):
    number: int


class Played(Message, frozen=True):
    number: int
    rollouts: list[bytes]
    lines: list[bytes]


class Lost(Message, frozen=True):
    number: int
    why: str


class Failed(Message, frozen=True):
    number: int
    error: tuple[str, str]


ToWorker = Begin | Runner | Play | Stop | Answer | Refusal
FromWorker = Ready | Ask | Withdraw | Played | Lost | Failed


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
    name, text = sent
    kind = getattr(errors, name, LudicError)
    kind = kind if isinstance(kind, type) and issubclass(kind, LudicError) else LudicError
    error: LudicError = kind.__new__(kind, text)
    error.args = (text,)
    return error
