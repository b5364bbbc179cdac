from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import DuplicateNameError, UnknownNameError
from ludic.inference import (
    HermesToolParser,
    JSONToolParser,
    ToolParse,
    ToolParser,
    get_tool_parser,
    list_tool_parsers,
    register_tool_parser,
)
from ludic.inference.templates.tool_parsers import MAX_REPORTED

HERMES, JSON = HermesToolParser(), JSONToolParser()

JSON_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | JSON_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(JSON_TEXT, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.tuples(JSON_TEXT.filter(bool), st.dictionaries(JSON_TEXT, JSON_VALUES, max_size=3))


def calls_of(parsed: ToolParse) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in parsed.tool_calls]


def hermes(name: str, arguments: Any) -> str:
    # An escaped "<" keeps a tag inside of a string from looking like a real one.
    body = json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")
    return f"<tool_call>\n{body}\n</tool_call>"


@given(
    calls=st.lists(CALLS, max_size=4), prose=st.sampled_from(["", "Let me see.", " \n", "a < b"])
)
def test_what_is_written_as_tagged_calls_is_read_back(
    calls: list[tuple[str, Any]], prose: str
) -> None:
    parsed = HERMES.parse(prose + "\n".join(hermes(*call) for call in calls))
    assert calls_of(parsed) == calls
    assert parsed.errors == ()
    assert parsed.content == (prose.strip() if calls else prose)


@given(
    calls=st.lists(CALLS, min_size=1, max_size=4), key=st.sampled_from(["arguments", "parameters"])
)
def test_what_is_written_as_plain_json_is_read_back(calls: list[tuple[str, Any]], key: str) -> None:
    objects = [{"name": name, key: arguments} for name, arguments in calls]
    parsed = JSON.parse(" " + json.dumps(objects) + "\n")
    assert calls_of(parsed) == calls
    assert (parsed.content, parsed.errors) == ("", ())
    assert calls_of(JSON.parse(json.dumps(objects[0]))) == calls[:1]


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "{", "}", "[", "]", '"', ":", ",", '"name"', '"arguments"',
     "NaN", "\\", "\\ud800", '{"name": "f", "arguments": {}}', "1e999", "\x00", " ", "é", "0" * 20]
)  # fmt: skip


@pytest.mark.parametrize("parser", [HERMES, JSON])
@given(text=st.lists(FRAGMENTS | st.text(max_size=4), max_size=12).map("".join))
def test_any_text_is_answered_and_what_is_read_as_a_call_is_one(
    parser: ToolParser, text: str
) -> None:
    parsed = parser.parse(text)
    for call in parsed.tool_calls:
        assert call["function"]["name"]
        assert isinstance(call["function"]["arguments"], dict)
        json.dumps(call, allow_nan=False, ensure_ascii=False).encode()
    assert len(parsed.errors) <= MAX_REPORTED + 2
    if not parsed.tool_calls:
        assert parsed.content == text
    if isinstance(parser, HermesToolParser):
        opened, closed = text.count(parser.OPEN), text.count(parser.CLOSE)
        # Every tag belongs to a call that was read, or to something that was reported.
        assert parsed.errors or opened == closed == len(parsed.tool_calls)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('[{"name": "f", "arguments": {}}]', "not a list"),
        ('"f"', "not a string"),
        ("null", "not null"),
        ('{"name": "f", "arguments": {}', "broken JSON"),
        ("{'name': 'f', 'arguments': {}}", "broken JSON"),
        ('{"name": "f", "arguments": {}},', "broken JSON"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": "", "arguments": {}}', '"name"'),
        ('{"name": 7, "arguments": {}}', '"name"'),
        ('{"name": "f"}', "lacks"),
        ('{"name": "f", "parameters": {}}', "lacks"),
        ('{"name": "f", "arguments": [1]}', "must be a JSON object, not a list"),
        ('{"name": "f", "arguments": "{}"}', "must be a JSON object, not a string"),
        ('{"name": "f", "arguments": null}', "must be a JSON object, not null"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "1e999, which is no"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}}', "repeats a key"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "limit"),
        ("[" * 100_000, "nested too deeply"),
        ("", "broken JSON"),
    ],
)
def test_a_malformed_call_is_reported_and_left_in_the_text(body: str, said: str) -> None:
    text = f"Well. <tool_call>{body}</tool_call>"
    parsed = HERMES.parse(text)
    assert parsed.tool_calls == ()
    assert parsed.content == text
    (error,) = parsed.errors
    assert said in error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>{"name": "f", "arguments": {}}', "without </tool_call>"),
        ('{"name": "f", "arguments": {}}</tool_call>', "without <tool_call>"),
    ],
)
def test_a_tag_without_its_partner_is_reported(text: str, said: str) -> None:
    parsed = HERMES.parse(text)
    assert parsed.tool_calls == ()
    (error,) = parsed.errors
    assert said in error


def test_a_good_call_beside_a_malformed_one_is_read() -> None:
    good = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    parsed = HERMES.parse(f"<tool_call>oops{good}<tool_call>[]</tool_call>")
    assert calls_of(parsed) == [("f", {"x": 1})]
    assert len(parsed.errors) == 2
    assert parsed.content == "<tool_call>oops<tool_call>[]</tool_call>"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"name": "f", "arguments": {}', "broken JSON"),
        ('{"name": "f", "arguments": {}} and more', "broken JSON"),
        ('{"name": "f", "arguments": {}, "parameters": {}}', "both"),
        ('{"answer": 4}', '"name"'),
        ('[{"name": "f", "arguments": {}}, 3]', "not a number"),
    ],
)
def test_plain_json_that_is_no_call_is_reported(text: str, said: str) -> None:
    parsed = JSON.parse(text)
    assert parsed.content == text
    (error,) = parsed.errors
    assert said in error


@pytest.mark.parametrize("text", ["", "hello", "[1, 2]", "see {x}", "[A] moves"])
def test_text_that_is_not_json_calls_nothing(text: str) -> None:
    assert JSON.parse(text) == ToolParse(text)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 50_000,
        "</tool_call>" * 50_000,
        "<tool_call>" * 50_000 + "</tool_call>" * 50_000,
        "<tool_call>[</tool_call>" * 20_000,
        "<tool_call>" + "{" * 500_000 + "</tool_call>",
        "<tool_call>" + " " * 500_000 + "</tool_call>",
        "[" + " " * 500_000 + "{",
    ],
)
@pytest.mark.timeout(20)  # quadratic work on these would take many minutes
def test_adversarial_text_is_answered_in_linear_time(text: str) -> None:
    for parser in (HERMES, JSON):
        assert parser.parse(text).tool_calls == ()
    assert len(HERMES.parse(text).errors) <= MAX_REPORTED + 2


def test_parsers_are_found_by_name_and_others_can_be_registered() -> None:
    assert isinstance(get_tool_parser("hermes"), HermesToolParser)
    assert isinstance(get_tool_parser("json"), JSONToolParser)
    with pytest.raises(UnknownNameError, match="hermes"):
        get_tool_parser("hermess")

    @register_tool_parser("only-in-this-test")
    class Mine(JSONToolParser):
        pass

    assert isinstance(get_tool_parser("only-in-this-test"), Mine)
    assert "only-in-this-test" in list_tool_parsers()
    with pytest.raises(DuplicateNameError, match="hermes"):
        register_tool_parser("hermes", JSONToolParser)
