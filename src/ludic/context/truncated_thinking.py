"""Earlier turns without their thinking."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ludic.context.full_dialog import FullDialog
from ludic.types import Message

# No `*+` of a group: Python 3.11.4 and older misread it.
_UNOPENED = re.compile(r"[^<]*+(?:<(?!/?think>)[^<]*+)*</think>\s*")
_BLOCK = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)


class TruncatedThinkingContext(FullDialog):
    """Keeps the full history and trims `<think>…</think>` from the assistant messages of earlier
    turns in what is shown.

    The current turn (what came after the last observation, tool calls included) keeps its
    thinking. Trimming rewrites history, so the first prompt of a turn forks from the one before
    wherever there was something to trim.
    """

    def __init__(self, placeholder: str = "") -> None:
        super().__init__()
        self.placeholder = placeholder
        self._shown: list[Message] = []

    def reset(self, system_prompt: str | None = None) -> None:
        super().reset(system_prompt)
        self._shown = []

    def on_before_act(self) -> Sequence[Message]:
        self._settle()
        turn = _start_of_turn(self._messages)
        # Each message is trimmed once, when its turn is over; after that its object stays.
        self._shown.extend(map(self._trim, self._messages[len(self._shown) : turn]))
        return (*self._shown, *self._messages[turn:])

    def _trim(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        content = without_thinking(message["content"], self.placeholder)
        if content == message["content"]:
            return message
        trimmed = message.copy()
        trimmed["content"] = content
        return trimmed


def without_thinking(text: str, placeholder: str = "") -> str:
    """The text with `placeholder` for each thinking block and the white space after it.

    A block that the template had opened (a `</think>` with no `<think>` before it) counts from
    the start, and one that was never closed counts to the end.
    """
    lead = _UNOPENED.match(text)
    rest = text[lead.end() :] if lead else text
    return (placeholder if lead else "") + _BLOCK.sub(lambda _: placeholder, rest)


def _start_of_turn(messages: Sequence[Message]) -> int:
    """The place of the last user message: the observation that the current turn answers."""
    for place in range(len(messages) - 1, -1, -1):
        if messages[place]["role"] == "user":
            return place
    return 0
