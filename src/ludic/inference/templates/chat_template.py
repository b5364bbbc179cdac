"""Messages to token ids, and back.

`ChatTemplate` is the contract; `HFChatTemplate` (in `hf`) fulfils it with any Hugging Face
tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ludic.plumbing.records import Record
from ludic.types import ChatResponse, Fork, Message, TokenTrace, ToolCall


class ParsedCompletion(Record, frozen=True):
    """A completion read as the assistant's message. Malformed tool calls are reported in
    `tool_call_errors`, one sentence each, and never guessed."""

    message: Message
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_errors: tuple[str, ...] = ()


class ChatTemplate(Protocol):
    """How one model's conversations are spelled in tokens. Stateless, shared by all agents.

    A template that can choose a tool parser is also a `ChoosesToolParser`; one that recorded
    answers can be trained with is also a `ClosesMessages`, and may be a `SpellsAnswers`.
    """

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The prompt for the next assistant message: the whole conversation, and the opening of
        the assistant's turn."""

    def extend(
        self,
        messages: Sequence[Message],
        previous: TokenTrace,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int] | Fork:
        """The ids to append to `previous.token_ids` so that the result is a valid next prompt.

        `messages` is the whole conversation as it now reads; its last assistant message is the
        one that `previous` sampled, from the messages before it, which the caller vouches are
        unchanged. Returns a `Fork` when the template would now spell the earlier part
        differently (thinking stripped, a tool call rendered in another form). White space that
        the template would trim is not a fork: the sampled tokens stand. A closing token that a cut
        completion lacks is part of the result.
        """

    def parse(self, response: ChatResponse) -> ParsedCompletion:
        """The assistant's message, decoded from the sampled ids (special tokens that end a turn
        left out), with its tool calls."""


@runtime_checkable
class ChoosesToolParser(Protocol):
    """A template that finds out how its model writes tool calls."""

    def for_tools(self) -> ChatTemplate:
        """Returns this template, able to read tool calls. Raises `ConfigError` if it cannot."""


@runtime_checkable
class ClosesMessages(Protocol):
    """A template that knows which token ends an assistant message."""

    @property
    def end_token_id(self) -> int: ...


@runtime_checkable
class SpellsAnswers(Protocol):
    """A template that can tokenise an answer without its prompt."""

    def encode_answer(self, content: str) -> tuple[int, ...]:
        """Returns the ids a model would sample for this text, up to and with the end token."""
