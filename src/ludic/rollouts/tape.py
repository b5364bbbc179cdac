"""A record in place of a model: a client and a template that return what was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ludic.errors import InferenceError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.templates.chat_template import ParsedCompletion
from ludic.types import (
    AgentStep,
    ChatResponse,
    Fork,
    ForkReason,
    Info,
    Message,
    Rollout,
    TokenTrace,
)


class _RecordEnded(InferenceError):
    """The replay asks for a model call that the record does not have."""


class Tape:
    """The recorded model calls of each conversation, to be taken in order."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self._calls = {r.id: list(r.agent_steps) for r in rollouts}
        self._next = dict.fromkeys(self._calls, 0)
        self._compactions = {r.id: _compactions(r) for r in rollouts}
        self.unknown: str | None = None

    def take(self, conversation_id: str | None) -> tuple[str, int]:
        """The place of the conversation's next call."""
        if conversation_id not in self._calls or conversation_id is None:
            self.unknown = str(conversation_id)
            raise _RecordEnded(f"no rollout {conversation_id!r} was given")
        number = self._next[conversation_id]
        if number == len(self._calls[conversation_id]):
            raise _RecordEnded(f"rollout {conversation_id!r} has {number} model calls, not more")
        self._next[conversation_id] = number + 1
        return conversation_id, number

    def compaction(self, conversation_id: str | None) -> Info | None:
        """The `info` of the compaction that the conversation's next call belongs to, if any."""
        of_conversation = self._compactions.get(conversation_id or "", {})
        return of_conversation.get(self._next.get(conversation_id or "", 0))

    def call_at(self, rollout_id: str, number: int) -> AgentStep:
        """The recorded call at a place that `take` gave."""
        return self._calls[rollout_id][number]


def _compactions(rollout: Rollout) -> dict[int, Info]:
    """Where the rollout's dialogue was compacted: the `info`, by the number of the first call."""
    calls = [place for place, step in enumerate(rollout.steps) if isinstance(step, AgentStep)]
    return {
        calls.index(step.agent_steps[0]): step.info
        for step in rollout.env_steps
        if step.info.get("compacted") and step.agent_steps
    }


class TapeClient:
    """Returns, for each conversation's calls, what was recorded for them."""

    def __init__(self, tape: Tape, *, with_tokens: bool) -> None:
        self._tape = tape
        self._with_tokens = with_tokens

    @property
    def max_context_tokens(self) -> int | None:
        return None

    def compaction(self, conversation_id: str | None) -> Info | None:
        """As for an agent that asks whether its dialogue was compacted here."""
        return self._tape.compaction(conversation_id)

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        place = self._tape.take(request.conversation_id)
        step = self._tape.call_at(*place)
        trace = None
        if self._with_tokens:
            if step.trace is None:
                raise _RecordEnded("the record has no token ids: replay it without a template")
            trace = replace(step.trace, prompt_token_ids=request.prompt_token_ids)
        return ChatResponse(trace, step.finish_reason, info={"replayed_from": list(place)})

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        raise NotImplementedError("a record has no weights")


class TapeTemplate:
    """Stands where a template would: messages pass as they were recorded, without tokens."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        return []

    def extend(
        self,
        messages: Sequence[Message],
        previous: TokenTrace,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int] | Fork:
        return Fork(ForkReason.TEMPLATE_NOT_EXTENSIBLE)

    def parse(self, response: ChatResponse) -> ParsedCompletion:
        step = self._tape.call_at(*response.info["replayed_from"])
        calls = tuple(step.message.get("tool_calls", ()))
        # Errors of the tools themselves are recorded in the same place; only calls that could
        # not be read have no tool message that names a call.
        unread = sum("tool_call_id" not in m for m in step.tool_messages)
        errors = step.tool_call_errors[:unread] if step.tool_messages else step.tool_call_errors
        return ParsedCompletion(step.message, calls, errors)
