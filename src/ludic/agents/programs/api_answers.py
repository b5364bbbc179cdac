"""Completions in the format of the chat completions API: whole, and as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from ludic.agents.model_calls import ModelCall
from ludic.inference.openai_client import wire_messages
from ludic.types import FinishReason, Message


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program is given for one model call; the same again whenever the call is repeated."""

    id: str
    created: int
    model: str
    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def completion(self) -> dict[str, Any]:
        """The answer as one object."""
        choice = {
            "index": 0,
            "message": self._wire(),
            "logprobs": None,
            "finish_reason": self.finish_reason,
        }
        return {**self._envelope("chat.completion"), "choices": [choice], "usage": self._usage()}

    def events(self, *, include_usage: bool) -> Iterator[bytes]:
        """The answer as server-sent events. It was sampled whole, and comes in few parts."""
        wire = self._wire()
        parts: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if wire["content"]:
            parts.append({"content": wire["content"]})
        for index, call in enumerate(wire.get("tool_calls", ())):
            parts.append({"tool_calls": [{"index": index, **call}]})
        for delta in parts:
            yield self._chunk([{"index": 0, "delta": delta, "finish_reason": None}], include_usage)
        end = {"index": 0, "delta": {}, "finish_reason": self.finish_reason}
        yield self._chunk([end], include_usage)
        if include_usage:
            yield self._chunk([], include_usage, usage=self._usage())
        yield b"data: [DONE]\n\n"

    def _chunk(
        self, choices: list[Any], include_usage: bool, usage: dict[str, int] | None = None
    ) -> bytes:
        data = {**self._envelope("chat.completion.chunk"), "choices": choices}
        if include_usage:
            data["usage"] = usage
        return f"data: {json.dumps(data)}\n\n".encode()

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _wire(self) -> dict[str, Any]:
        wire = wire_messages([self.message])[0]
        if not wire["content"] and wire.get("tool_calls"):
            wire["content"] = None
        return {**wire, "refusal": None}

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def answer_of(
    call: ModelCall, stop: tuple[str, ...], *, id: str, created: int, model: str
) -> Answer:
    """The answer that a call gives to a program. Text from a stop string on is not shown, though
    its tokens were sampled and are recorded."""
    message = cast(Message, dict(call.parsed.message))
    ends = [at for text in stop if (at := message["content"].find(text)) >= 0]
    if ends:
        message["content"] = message["content"][: min(ends)]
    trace = call.response.trace
    reason = "tool_calls" if call.parsed.tool_calls else "stop"
    return Answer(
        id=id,
        created=created,
        model=model,
        message=message,
        finish_reason="length" if call.response.finish_reason is FinishReason.LENGTH else reason,
        prompt_tokens=len(trace.prompt_token_ids) if trace else 0,
        completion_tokens=len(trace.completion_token_ids) if trace else 0,
    )
