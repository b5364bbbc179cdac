"""Prompts that are rendered once for a group, and which conversations may be."""

from __future__ import annotations

from typing import Any

import pytest

from ludic.errors import TemplateError
from ludic.inference import HFChatTemplate
from ludic.inference.templates.openings import Openings, spelling
from ludic.inference.tiny import tiny_tokenizer
from ludic.types import FinishReason, TokenTrace


def test_a_prompt_that_comes_again_is_the_same_and_can_be_extended() -> None:
    template, other = HFChatTemplate(tiny_tokenizer()), HFChatTemplate(tiny_tokenizer())
    asked: Any = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
    first = template.render(asked)
    first.append(0)  # the caller's own list
    copies: Any = [dict(m) for m in asked]
    again = template.render(copies)
    assert again == other.render(asked)
    answer = [*template.codec.encode("2"), template.end_token_id]
    trace = TokenTrace(tuple(again), tuple(answer))
    said: Any = [{"role": "assistant", "content": "2"}, {"role": "user", "content": "Right."}]
    assert template.extend([*asked, *said], trace) == other.extend([*asked, *said], trace)


def test_a_message_without_content_is_refused_although_an_empty_one_was_rendered() -> None:
    template = HFChatTemplate(tiny_tokenizer())
    template.render([{"role": "user", "content": ""}])
    with pytest.raises(TemplateError, match="content"):
        template.render([{"role": "user", "name": "x"}])  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a", "name": "b"},
        {"role": "user"},
        {"role": "user", "name": "b"},
        {"role": FinishReason.STOP, "content": "a"},
        {"role": "user", "content": "a" * 40_000},
    ],
)
def test_only_short_messages_of_role_and_content_are_remembered(message: Any) -> None:
    assert spelling([message]) is None
    assert spelling([{"role": "user", "content": "a"}] * 9) is None
    assert spelling([{"role": "user", "content": "a"}]) == ("user", "a")


def test_the_oldest_openings_are_forgotten() -> None:
    openings: Openings[int] = Openings()
    for n in range(1000):
        openings.keep((str(n),), n)
    assert openings.find(("999",)) == 999
    assert openings.find(("0",)) is None
    openings.keep(None, 1)
    assert openings.find(None) is None
