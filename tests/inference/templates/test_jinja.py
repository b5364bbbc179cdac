"""Chat templates as text: the short ways of the sandbox say what the long ones say."""

from __future__ import annotations

import datetime as dt

import pytest

from ludic.errors import TemplateError
from ludic.inference.templates.jinja import JinjaTemplate

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def rendered(source: str) -> str:
    return JinjaTemplate(source, {}, dt.date(2024, 1, 1)).render(MESSAGES, None)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in messages %}{{ m['content'] }}{{ m.role }} {% endfor %}",
            "hiuser hoassistant ",
        ),
        ("{{ messages[0]['tool_calls'] is defined }}", "False"),
        ("{{ messages[0]['tool_calls'] or 'none' }}", "none"),
        ("{% for k in messages[0]['keys']() %}{{ k }} {% endfor %}", "role content "),
        ("{{ messages[-1]['content'] }}{{ messages[7] is defined }}", "hoFalse"),
    ],
)
def test_keys_of_messages_are_looked_up_whether_or_not_they_are_there(
    source: str, text: str
) -> None:
    assert rendered(source) == text


def test_a_missing_key_that_is_used_is_named() -> None:
    with pytest.raises(TemplateError, match="has no attribute 'name'"):
        rendered("{{ messages[0]['name'].upper() }}")


def test_namespaces_keep_what_loops_set_also_those_made_in_a_loop() -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set own = namespace(x=m.role) %}"
        "{% set ns.n = ns.n + 1 %}{{ own.x }}{{ own._loop_vars is defined }} {% endfor %}{{ ns.n }}"
    )
    assert rendered(source) == "userFalse assistantFalse 2"


def test_what_the_sandbox_forbids_stays_forbidden() -> None:
    with pytest.raises(TemplateError):
        rendered("{{ messages[0]['__class__']['__mro__'] }}")
    with pytest.raises(TemplateError):
        rendered("{{ messages[0].clear() }}")
