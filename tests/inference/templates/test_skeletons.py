"""A conversation spelled from its skeleton reads as the template renders it."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import TemplateError
from ludic.inference.templates.jinja import JinjaTemplate

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<sys>Be kind.</sys>' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EACH = "{% for message in messages %}[{{ message.role }}:%s]{% endfor %}"
LOOKING = [
    "{{ message.content | trim }}",
    "{{ message.content.strip() }}",
    "{{ message['content'] | length }}",
    "{{ message.content | tojson }}",
    "{{ message.content[0:1] }}",
    "{{ 'empty' if not message.content else message.content }}",
    "{{ message.content if 'a' in message.content else 'none' }}",
    "{{ message.content if message.content in 'abc' else 'none' }}",
    "{{ message.content == 'a' }}",
    "{{ message.content is sequence }}",
    "{{ message.content is iterable }}",
    "{{ message.content is lower }}",
    "{{ '%s!' % message.content }}",
    "{{ '{}!'.format(message.content) }}",
    "{{ [message.content] | join }}",
    "{{ (message.role ~ message.content) | trim }}",
    "{{ message.content | string | trim }}",
    "{{ message.content * 2 }}",
    "{{ message }}",
    "{{ messages | map(attribute='content') | join(',') }}",
    "{{ messages | map(attribute='content') | sort | first }}",
    "{% for letter in message.content %}{{ letter }},{% endfor %}",
    "{% set shown %}{{ message.content }}{% endset %}{{ shown | trim }}",
    "{% filter trim %}{{ message.content }}{% endfilter %}",
    "{% macro show(text) %}{{ text }}{% endmacro %}{{ show(message.content) | trim }}",
]
PLAIN = [
    "{{ message.content }}",
    "{{ message.content if message.content is string else 'list' }}",
    "{{ message.content is mapping }}{{ message.content is none }}{{ message.content is defined }}",
    "{% set text = '<' + message.content %}{{ text + '>' }}{{ text }}",
    "{{ messages[-1].content }}",
    "{{ message.content | default('nothing') }}",
    "{{ loop.index }}{{ loop.last }}{{ messages | length }}",
]
CONVERSATIONS = st.lists(
    st.tuples(
        st.sampled_from(["system", "user", "assistant", "tool"]), st.text(" \nab\ufdd1\ufdd00{")
    ),
    min_size=1,
    max_size=5,
)


def made(source: str) -> JinjaTemplate:
    return JinjaTemplate(source, {"eos_token": "</s>"}, dt.date(2025, 1, 1))


def conversation(said: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


CHATML_TEMPLATE = made(CHATML)


@given(said=CONVERSATIONS)
def test_a_template_that_adds_contents_to_text_is_spelled_as_it_renders(
    said: list[tuple[str, str]],
) -> None:
    messages = conversation(said)
    rendered = CHATML_TEMPLATE._rendered(CHATML_TEMPLATE._template, messages)
    assert CHATML_TEMPLATE.render(messages, None) == rendered
    assert CHATML_TEMPLATE._skeletons is not None
    assert CHATML_TEMPLATE._skeletons.spell(messages) == rendered


@pytest.mark.parametrize("part", PLAIN + LOOKING)
def test_every_conversation_reads_as_the_template_renders_it(part: str) -> None:
    template = made(EACH.replace("%s", part, 1))
    for contents in (
        ("a", "b"),
        (" a ", ""),
        ("", "\nab\n"),
        ("\ufdd10\ufdd1", "</think>"),
        ("A", "a"),
    ):
        messages = conversation([("user", contents[0]), ("assistant", contents[1])])
        rendered = template._rendered(template._template, messages)
        assert template.render(messages, None) == rendered


@pytest.mark.parametrize("part", LOOKING)
def test_a_template_that_looks_into_contents_has_no_skeleton(part: str) -> None:
    skeletons = made(EACH.replace("%s", part, 1))._skeletons
    messages = conversation([("user", "a"), ("assistant", "b")])
    assert skeletons is None or skeletons.spell(messages) is None


@pytest.mark.parametrize("part", PLAIN)
def test_a_template_that_does_not_is_rendered_once_for_the_same_roles(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = made(EACH.replace("%s", part, 1))
    first = template.render(conversation([("user", "a")]), None)

    def never(*args: Any) -> str:
        raise AssertionError("rendered again")

    monkeypatch.setattr(template, "_rendered", never)
    assert template.render(conversation([("user", "a")]), None) == first
    assert isinstance(template.render(conversation([("user", "b")]), None), str)


def test_what_a_template_refuses_it_still_refuses_in_its_words() -> None:
    template = made("{{ raise_exception('no ' + messages[0].role) }}")
    for _ in range(2):
        with pytest.raises(TemplateError, match="no user"):
            template.render(conversation([("user", "a")]), None)


def test_messages_that_hold_more_are_rendered() -> None:
    template = made(EACH.replace("%s", "{{ message.content }}{{ message.name }}", 1))
    assert template.render(conversation([("user", "a")]), None) == "[user:a]"
    named = [{"role": "user", "content": "a", "name": "Ann"}]
    assert template.render(named, None) == "[user:aAnn]"
