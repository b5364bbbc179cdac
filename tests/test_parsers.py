"""Parsers: what each takes, what it refuses, and that no text can hang or fool them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import AgentError, ConfigError, UnknownNameError
from ludic.parsers import (
    Parser,
    ParseResult,
    boxed_parser,
    compose_parsers,
    json_parser,
    last_boxed,
    make_parser,
    regex_parser,
    text_parser,
    think_prefix_parser,
    xml_parser,
    xml_tag_parser,
)

GOOD, BAD = 0.25, -0.5
REWARDS: dict[str, Any] = {"success_reward": GOOD, "error_reward": BAD}

ALL_PARSERS: dict[str, Parser] = {
    "text": text_parser(**REWARDS),
    "xml": xml_parser("move", **REWARDS),
    "xml_exact": xml_parser("move", exact=True, **REWARDS),
    "think": think_prefix_parser(**REWARDS),
    "think_prefilled": think_prefix_parser(prefilled=True, **REWARDS),
    "boxed": boxed_parser(**REWARDS),
    "json": json_parser(**REWARDS),
    "json_key": json_parser("move", **REWARDS),
    "regex": regex_parser(r"move:\s*(\w+)", **REWARDS),
}

FRAGMENTS = [
    *("<move>", "</move>", "<think>", "</think>", "\\boxed{", "\\boxed", "{", "}", "\\{", "\\}"),
    *('{"move": "B2"}', '{"move": ', '"', "[", "]", "```json\n", "```", "move: ", "B2", " ", "\n"),
    *("\\", "\x00", "\ufffd", "NaN", "1e999", "é", "\u2028"),
]
ADVERSARIAL = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map("".join))

HUGE = 1_000_000
HUGE_TEXTS = {
    "letters": "a" * HUGE,
    "spaces": " " * HUGE,
    "openings": "<move>" * (HUGE // 6),
    "closings": "</move>" * (HUGE // 7),
    "thinking": "<think>" * (HUGE // 7),
    "boxes": "\\boxed{" * (HUGE // 7),
    "braces": "\\boxed" + "{" * HUGE,
    "backslashes": "\\boxed{" + "\\" * HUGE,
    "brackets": "[" * HUGE,
    "nested_objects": '{"move":' * (HUGE // 8),
    "digits": '{"move": ' + "9" * HUGE + "}",
    "quotes": '"' * HUGE,
    "almost": "move:" + " " * HUGE,
    "newlines": "move:\n" * (HUGE // 6),
    "fences": "```" * (HUGE // 3),
}


@pytest.fixture(params=sorted(ALL_PARSERS))
def parser(request: pytest.FixtureRequest) -> Parser:
    return ALL_PARSERS[request.param]


class TestEveryParser:
    @pytest.mark.parametrize("text", ["", " ", "\n\t", "\x00"])
    def test_an_empty_answer_is_no_action(self, parser: Parser, text: str) -> None:
        result = parser(text)
        if parser is ALL_PARSERS["text"] and text == "\x00":
            return  # a control character is text like any other
        assert result.action is None
        assert result.reward == BAD
        assert result.obs

    @pytest.mark.parametrize("name", sorted(HUGE_TEXTS))
    def test_a_megabyte_of_anything_is_read_and_judged(self, parser: Parser, name: str) -> None:
        text = HUGE_TEXTS[name]
        result = parser(text)
        assert (result.reward == GOOD) == (result.action is not None)
        if result.action is None:
            assert len(result.obs or "") < 500

    def test_bytes_are_a_clear_type_error(self, parser: Parser) -> None:
        with pytest.raises(TypeError, match="decode it first"):
            parser(b"<move>B2</move>")  # type: ignore[arg-type]

    @given(text=ADVERSARIAL, name=st.sampled_from(sorted(ALL_PARSERS)))
    def test_the_reward_is_right_for_any_text(self, text: str, name: str) -> None:
        result = ALL_PARSERS[name](text)
        if result.action is None:
            assert result.reward == BAD
            assert result.obs
        else:
            assert result.reward == GOOD
            assert result.obs is None
            assert result.action.strip()

    @given(text=ADVERSARIAL, name=st.sampled_from(sorted(set(ALL_PARSERS) - {"json", "json_key"})))
    def test_an_action_is_a_part_of_the_text(self, text: str, name: str) -> None:
        action = ALL_PARSERS[name](text).action
        assert action is None or action in text

    @pytest.mark.parametrize("factory", [text_parser, think_prefix_parser, boxed_parser])
    @pytest.mark.parametrize("reward", [float("nan"), float("inf")])
    def test_a_reward_that_is_not_finite_is_refused_when_it_is_made(
        self, factory: Callable[..., Parser], reward: float
    ) -> None:
        with pytest.raises(ConfigError, match="finite"):
            factory(error_reward=reward)


class TestXml:
    parse = staticmethod(xml_parser("move", **REWARDS))

    @pytest.mark.parametrize(
        ("text", "action"),
        [
            ("<move>B2</move>", "B2"),
            ("I go <move> B2\n</move> now", "B2"),
            ("<move>A1</move> no: <move>B2</move>", "B2"),
            ("<move><move>B2</move>", "B2"),
            ("<move>a < b</move>", "a < b"),
            ("<move>A1\nB2</move>", "A1\nB2"),
        ],
    )
    def test_the_last_block_is_the_action(self, text: str, action: str) -> None:
        assert self.parse(text) == ParseResult(action, GOOD)

    @pytest.mark.parametrize(
        "text",
        [
            "B2",
            "<move>B2",
            "B2</move>",
            "<move></move>",
            "<move>  </move>",
            "<MOVE>B2</MOVE>",
            "<move >B2</move >",
            "</move>B2<move>",
            "<move>A1</move> wait, <move>B2",
            "<move>A1</move> or B2</move>",
        ],
    )
    def test_what_is_not_one_closed_block_fails(self, text: str) -> None:
        result = self.parse(text)
        assert (result.action, result.reward) == (None, BAD)
        assert "move" in (result.obs or "")

    @pytest.mark.parametrize(
        ("text", "action"),
        [
            (" <move>B2</move>\n", "B2"),
            ("I go <move>B2</move>", None),
            ("<move>B2</move> done", None),
            ("<move>A1</move><move>B2</move>", None),
        ],
    )
    def test_exact_allows_nothing_around_the_block(self, text: str, action: str | None) -> None:
        assert xml_parser("move", exact=True)(text).action == action

    @given(st.text(alphabet=st.characters(blacklist_characters="<"), min_size=1))
    def test_what_is_put_into_the_tags_comes_out(self, inner: str) -> None:
        expected = inner.strip() or None
        assert xml_parser("move")(f"before <move>{inner}</move> after").action == expected

    @pytest.mark.parametrize("tag", ["", "a b", "<move>", "1st", "m>"])
    def test_a_tag_that_is_no_name_is_refused(self, tag: str) -> None:
        with pytest.raises(ConfigError, match="tag name"):
            xml_parser(tag)

    def test_both_names_are_the_same_parser(self) -> None:
        assert xml_tag_parser is xml_parser


THOUGHT = [
    ("<think>Maybe {a}.</think> I cannot say.", None),
    ("<think>Maybe {a}.</think>", None),
    ("<think>Maybe {a}.", None),
    ("Maybe {a}.</think> I cannot say.", None),
    ("<think>Maybe {b}.</think> It is {a}.", "a"),
    ("Maybe {b}.</think> It is {a}.", "a"),
    ("<think>Maybe {b}.</think>{a}<think>Or {b}?</think>\n", "a"),
    ("{a} <think>Or {b}?</think> I am sure.", "a"),
    ("{a}", "a"),
]
"""Texts with two forms of an answer, and which of them the text answers with."""


@pytest.mark.parametrize(("text", "action"), THOUGHT)
def test_what_stands_only_in_the_thinking_is_no_answer(text: str, action: str | None) -> None:
    boxes = text.replace("{a}", "\\boxed{a}").replace("{b}", "\\boxed{b}")
    tags = text.replace("{a}", "<move>a</move>").replace("{b}", "<move>b</move>")
    assert boxed_parser()(boxes).action == action
    assert xml_parser("move")(tags).action == action


def test_the_thinking_itself_can_be_read_by_its_tag() -> None:
    assert xml_parser("think")("<think>B2</think> So be it.").action == "B2"


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        ({"action": 5}, "action is text or None"),
        ({"action": "a", "obs": b"no"}, "obs is text or None"),
        ({"action": "a", "reward": float("nan")}, "finite"),
        ({"action": None, "reward": -1e301}, "finite"),
        ({"action": "a", "reward": 10**400}, "finite"),
        ({"action": "a", "reward": "0.5"}, "finite"),
        ({"action": "a", "reward": None}, "finite"),
    ],
)
def test_a_parsers_own_result_must_be_text_and_a_finite_reward(
    result: dict[str, Any], fault: str
) -> None:
    with pytest.raises(AgentError, match=fault):
        ParseResult(**result)


class TestThinkPrefix:
    @pytest.mark.parametrize(
        ("text", "action"),
        [
            ("<think>hm</think>B2", "B2"),
            ("\n<think></think>\n B2 ", "B2"),
            ("B2", None),
            ("well <think>hm</think> B2", None),
            ("<think>hm", None),
            ("<think>hm</think>", None),
            ("<think>hm</think> <think>hm</think> B2", None),
            ("<think>a<think>b</think>B2", None),
            ("<think>a</think>B2</think>", None),
        ],
    )
    def test_one_block_at_the_start_and_then_the_answer(
        self, text: str, action: str | None
    ) -> None:
        assert think_prefix_parser()(text).action == action

    def test_a_template_may_have_opened_the_block(self) -> None:
        assert think_prefix_parser(prefilled=True)("hm</think> B2").action == "B2"
        assert think_prefix_parser(prefilled=True)("<think>hm</think> B2").action == "B2"
        assert think_prefix_parser(prefilled=True)("B2").action is None


BALANCED = st.recursive(
    st.sampled_from(["x", "1", "+", " ", "\\{", "\\}", "\\frac", "\\\\"]),
    lambda inner: st.lists(inner, max_size=4).map(lambda parts: "{" + "".join(parts) + "}"),
)


class TestBoxed:
    @pytest.mark.parametrize(
        ("text", "inner"),
        [
            (r"\boxed{42}", "42"),
            (r"so \boxed{1}, no: \boxed{2}.", "2"),
            (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
            (r"\boxed {x}", "x"),
            (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
            (r"\boxed{a\\}", r"a\\"),
            (r"\boxed{\boxed{5}}", "5"),
            (r"\boxed{1} then \boxed{2", None),
            (r"\boxed", None),
            (r"\boxed 5", None),
            ("42", None),
        ],
    )
    def test_the_last_box_with_its_nested_braces(self, text: str, inner: str | None) -> None:
        assert last_boxed(text) == inner
        assert boxed_parser()(text).action == inner

    def test_an_empty_box_is_no_answer(self) -> None:
        assert boxed_parser()(r"\boxed{ }").action is None

    @given(BALANCED.map(lambda inner: "x" + inner), st.text())
    def test_whatever_is_balanced_comes_out_whole(self, inner: str, after: str) -> None:
        if "\\boxed" not in after:
            assert last_boxed(f"text \\boxed{{{inner}}} {after}") == inner


class TestJson:
    @pytest.mark.parametrize(
        ("text", "action"),
        [
            ('{"move": "B2"}', "B2"),
            ('```json\n{"move": "B2"}\n```', "B2"),
            ('```\n{"move": "B2"}\n```', "B2"),
            ('{"move": 3}', "3"),
            ('{"move": {"x": [1, 2]}}', '{"x":[1,2]}'),
            ('{"move": null}', "null"),
            ('{"move": ""}', None),
            ('{"other": 1}', None),
            ('{"move": "A1", "move": "B2"}', None),
            ('{"move": NaN}', None),
            ('{"move": Infinity}', None),
            ('["move"]', None),
            ('"move"', None),
            ('{"move": "B2"} and more', None),
            ('{"move": "B2"', None),
        ],
    )
    def test_the_value_of_the_key(self, text: str, action: str | None) -> None:
        assert json_parser("move")(text).action == action

    def test_required_keys_must_be_there(self) -> None:
        parse = json_parser(required=["why", "move"])
        assert parse('{"why": "x", "move": 1}').action == '{"why":"x","move":1}'
        failed = parse('{"why": "x"}')
        assert failed.action is None
        assert "move" in (failed.obs or "")

    @given(
        st.dictionaries(
            st.text(),
            st.recursive(
                st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text(),
                lambda inner: (
                    st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
                ),
                max_leaves=5,
            ),
            max_size=3,
        )
    )
    def test_any_object_comes_back_as_it_was(self, value: dict[str, Any]) -> None:
        action = json_parser()(json.dumps(value)).action
        assert action is not None
        assert json.loads(action) == value


class TestRegex:
    @pytest.mark.parametrize(
        ("options", "text", "action"),
        [
            ({"pattern": r"\d+"}, "a 12 b 3", "12"),
            ({"pattern": r"move (\w+) to (\w+)"}, "move A1 to B2", "A1"),
            ({"pattern": r"move (\w+) to (\w+)", "group": 2}, "move A1 to B2", "B2"),
            ({"pattern": r"(?P<x>\w)(?P<y>\d)", "group": "y"}, "B2", "2"),
            ({"pattern": r"[ABC][123]", "full": True}, " B2 ", "B2"),
            ({"pattern": r"[ABC][123]", "full": True}, "B2!", None),
            ({"pattern": r"a(b)?"}, "a", None),
        ],
    )
    def test_the_chosen_group_is_the_action(
        self, options: dict[str, Any], text: str, action: str | None
    ) -> None:
        assert regex_parser(**options)(text).action == action

    def test_a_pattern_that_backtracks_for_ever_is_a_failed_parse(self) -> None:
        parse = regex_parser(r"^(?:a|a|b?)+(?:a+)+$", timeout_s=0.1, **REWARDS)
        result = parse("a" * 5000 + "!")
        assert (result.action, result.reward) == (None, BAD)
        assert "in time" in (result.obs or "")

    @pytest.mark.parametrize("options", [{"pattern": "("}, {"pattern": "a", "group": 1}])
    def test_a_pattern_that_cannot_work_is_refused_when_it_is_made(
        self, options: dict[str, Any]
    ) -> None:
        with pytest.raises(ConfigError, match="regex_parser"):
            regex_parser(**options)

    def test_the_feedback_can_be_given(self) -> None:
        assert regex_parser(r"\d", feedback="Write a digit.")("x").obs == "Write a digit."


class TestComposition:
    parse = staticmethod(
        compose_parsers(
            think_prefix_parser(success_reward=0.1, error_reward=-1.0),
            xml_parser("move", success_reward=0.2, error_reward=-2.0),
            regex_parser("[ABC][123]", full=True, success_reward=0.4, error_reward=-4.0),
        )
    )

    @pytest.mark.parametrize(
        ("text", "action", "reward"),
        [
            ("<think>x</think><move>B2</move>", "B2", 0.7),
            ("<move>B2</move>", None, -1.0),
            ("<think>x</think>B2", None, -1.9),
            ("<think>x</think><move>Z9</move>", None, -3.7),
        ],
    )
    def test_rewards_add_up_and_the_first_failure_stops(
        self, text: str, action: str | None, reward: float
    ) -> None:
        result = self.parse(text)
        assert result.action == action
        assert result.reward == pytest.approx(reward)
        assert (result.obs is None) == (action is not None)

    @given(
        st.lists(st.tuples(st.booleans(), st.floats(-10, 10)), min_size=1, max_size=6), st.text()
    )
    def test_the_sum_stops_at_the_first_failure(
        self, parts: list[tuple[bool, float]], text: str
    ) -> None:
        def part(ok: bool, reward: float) -> Parser:
            return lambda text: ParseResult(text if ok else None, reward, None if ok else "no")

        result = compose_parsers(*(part(ok, reward) for ok, reward in parts))(text)
        failures = [place for place, (ok, _) in enumerate(parts) if not ok]
        last = failures[0] if failures else len(parts) - 1
        assert result.reward == pytest.approx(sum(reward for _, reward in parts[: last + 1]))
        assert result.action == (None if failures else text)

    def test_no_parsers_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="at least one"):
            compose_parsers()


class TestSpecs:
    @pytest.mark.parametrize(
        ("spec", "text", "action"),
        [
            ("text", " B2 ", "B2"),
            ("boxed", r"\boxed{B2}", "B2"),
            ({"kind": "xml", "tag": "move"}, "<move>B2</move>", "B2"),
            ({"kind": "json", "key": "move"}, '{"move": "B2"}', "B2"),
            ({"kind": "regex", "pattern": "[ABC][123]"}, "to B2", "B2"),
            (["think_prefix", {"kind": "xml", "tag": "m"}], "<think>x</think><m>B2</m>", "B2"),
        ],
    )
    def test_a_parser_is_made_from_json(self, spec: Any, text: str, action: str) -> None:
        assert make_parser(json.loads(json.dumps(spec)))(text).action == action

    def test_a_parser_is_its_own_spec(self) -> None:
        parse = boxed_parser()
        assert make_parser(parse) is parse

    def test_an_unknown_kind_answers_with_the_nearest(self) -> None:
        with pytest.raises(UnknownNameError, match="'boxed'"):
            make_parser("boxd")

    @pytest.mark.parametrize("spec", [{"tag": "move"}, {"kind": 3}, {"kind": "xml"}, []])
    def test_a_spec_that_cannot_be_made_is_a_configuration_error(self, spec: Any) -> None:
        with pytest.raises(ConfigError):
            make_parser(spec)

    def test_an_option_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(ConfigError, match="sucess_reward"):
            make_parser({"kind": "boxed", "sucess_reward": 1})
