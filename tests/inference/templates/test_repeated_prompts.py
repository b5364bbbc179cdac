"""Prompts that come again, as those of a group do."""

from __future__ import annotations

from typing import Any

import pytest

from ludic.errors import TemplateError
from ludic.inference import HFChatTemplate
from ludic.inference.tiny import tiny_tokenizer
from ludic.types import TokenTrace


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
