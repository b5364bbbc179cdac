"""Whether a template spells a sampled message as it was sampled, and if not, why.

White space where a template may trim or set its own (the ends of a message, and next to the tags
of thinking and of tool calls) makes no difference. Anything else does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from ludic.inference.templates.token_codec import literal_pattern, unguard
from ludic.types import Fork, ForkReason, Message

THINK_CLOSE = "</think>"
# Nothing between the tags may open another block: that keeps it linear in the text's length.
_THINKING = re.compile(r"<think>[^<]*+(?:<(?!/?think>)[^<]*+)*+</think>\s*")


def same_message(sampled: str, spelled: str, markers: Sequence[str]) -> bool:
    """Whether the two differ in nothing but white space at their ends and around `markers`."""
    if sampled == spelled:
        return True
    return _trimmed(sampled, tuple(markers)) == _trimmed(spelled, tuple(markers))


def fork_of_history(previous: str, now: str) -> Fork:
    """Why the text of the earlier prompt is no longer the beginning of the conversation's."""
    if THINK_CLOSE in previous and without_thinking(now).startswith(
        without_thinking(previous).rstrip()
    ):
        return Fork(ForkReason.THINKING_STRIPPED, "the thinking of an earlier message is left out")
    return Fork(
        ForkReason.TEMPLATE_NOT_EXTENSIBLE,
        f"the template spells the earlier messages differently now: {_difference(previous, now)}",
    )


def fork_of_message(sampled: str, spelled: str, message: Message) -> Fork:
    """Why the sampled message is spelled differently."""
    detail = _difference(sampled, spelled)
    if sampled.count(THINK_CLOSE) > spelled.count(THINK_CLOSE):
        return Fork(ForkReason.THINKING_STRIPPED, detail)
    if message.get("tool_calls"):
        return Fork(ForkReason.TOOL_CALL_RERENDERED, detail)
    return Fork(ForkReason.CONTENT_RERENDERED, detail)


def without_thinking(text: str) -> str:
    """The text without its closed blocks of thinking and the white space after them."""
    return _THINKING.sub("", text)


def _trimmed(text: str, markers: tuple[str, ...]) -> list[str]:
    return [part.strip() for part in _splitter(markers).split(text)]


@lru_cache(maxsize=64)
def _splitter(markers: tuple[str, ...]) -> re.Pattern[str]:
    # In parentheses, so that the markers themselves are part of what is compared.
    return re.compile(f"({literal_pattern(markers).pattern})")


def _difference(first: str, second: str, around: int = 24) -> str:
    first, second = unguard(first), unguard(second)
    limit = min(len(first), len(second))
    at = next((i for i in range(limit) if first[i] != second[i]), limit)
    return f"{first[at : at + around]!r} became {second[at : at + around]!r} at character {at}"
