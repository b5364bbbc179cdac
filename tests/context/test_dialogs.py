"""What the model is shown of the history, under each strategy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.context import (
    ContextStrategy,
    FullDialog,
    TruncatedThinkingContext,
    WindowedDialog,
    make_context,
)
from ludic.context.truncated_thinking import without_thinking
from ludic.errors import ConfigError, UnknownNameError
from ludic.types import Message


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": "1"}


def contents(context: ContextStrategy) -> list[str]:
    return [message["content"] for message in context.on_before_act()]


def play(context: ContextStrategy, turns: int, *, system: str | None = "sys") -> None:
    """Plays `turns` turns and shows the observation of the next one."""
    context.reset(system)
    context.on_env_reset("obs 0", {})
    for turn in range(turns):
        context.on_before_act()
        context.on_after_act(assistant(f"<think>thought {turn}</think>act {turn}"))
        context.on_after_step(f"obs {turn + 1}", {})


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("obs"), st.text(max_size=5)),
        st.tuples(st.just("act"), st.sampled_from(["a", "<think>b</think>c", "</think>d"])),
        st.tuples(st.just("tool"), st.text(max_size=5)),
        st.tuples(st.just("show"), st.just("")),
    )
)
CONTEXTS: list[Any] = [
    "full_dialog",
    "truncated_thinking",
    {"kind": "windowed", "max_turns": 2},
    {"kind": "windowed", "max_turns": 1, "keep_first": True},
]


class TestFullDialog:
    def test_everything_is_shown_in_order(self) -> None:
        context = FullDialog()
        play(context, 2)
        assert contents(context) == [
            "sys",
            "obs 0",
            "<think>thought 0</think>act 0",
            "obs 1",
            "<think>thought 1</think>act 1",
            "obs 2",
        ]
        assert [m["role"] for m in context.on_before_act()] == [
            *("system", "user", "assistant", "user", "assistant", "user")
        ]

    def test_without_a_system_prompt_there_is_no_system_message(self) -> None:
        context = FullDialog()
        play(context, 0, system=None)
        assert contents(context) == ["obs 0"]

    def test_a_reset_forgets_everything(self) -> None:
        context = FullDialog()
        play(context, 2)
        context.on_after_step("never shown", {})
        context.reset("new")
        assert contents(context) == ["new"]

    def test_observations_between_two_acts_make_one_user_message(self) -> None:
        context = FullDialog()
        context.reset(None)
        context.on_env_reset("X moves first.", {})
        context.on_after_step("X took A1.", {})
        assert contents(context) == ["X moves first.\n\nX took A1."]

    def test_an_empty_observation_adds_no_message(self) -> None:
        context = FullDialog()
        play(context, 1)
        context.on_after_act(assistant("x"))
        context.on_after_step("", {})
        context.on_after_step("your turn", {})
        assert contents(context)[-2:] == ["x", "your turn"]

    def test_tool_messages_follow_the_message_that_called(self) -> None:
        context = FullDialog()
        play(context, 0)
        context.on_after_act(assistant("call"))
        context.on_tool_results([tool("4"), tool("5")])
        assert contents(context) == ["sys", "obs 0", "call", "4", "5"]

    @given(EVENTS)
    def test_each_prompt_begins_with_the_very_messages_of_the_one_before(
        self, events: list[tuple[str, str]]
    ) -> None:
        context = FullDialog()
        context.reset("sys")
        before: tuple[Message, ...] = ()
        for kind, text in events:
            if kind == "obs":
                context.on_after_step(text, {})
            elif kind == "act":
                context.on_after_act(assistant(text))
            elif kind == "tool":
                context.on_tool_results([tool(text)])
            else:
                shown = tuple(context.on_before_act())
                assert all(a is b for a, b in zip(before, shown, strict=False))
                assert len(shown) >= len(before)
                before = shown


class TestTruncatedThinking:
    def test_earlier_turns_are_shown_without_thinking_and_kept_with_it(self) -> None:
        context = TruncatedThinkingContext()
        play(context, 2)
        assert contents(context) == ["sys", "obs 0", "act 0", "obs 1", "act 1", "obs 2"]
        assert [m["content"] for m in context.history][2] == "<think>thought 0</think>act 0"

    def test_the_current_turn_keeps_its_thinking_through_its_tool_calls(self) -> None:
        context = TruncatedThinkingContext()
        play(context, 1)
        context.on_after_act(assistant("<think>now</think>call"))
        context.on_tool_results([tool("4")])
        assert contents(context)[-4:] == ["act 0", "obs 1", "<think>now</think>call", "4"]
        context.on_after_act(assistant("done"))
        context.on_after_step("obs 2", {})
        assert contents(context)[-4:] == ["call", "4", "done", "obs 2"]

    def test_a_trimmed_message_stays_the_same_object(self) -> None:
        context = TruncatedThinkingContext()
        play(context, 2)
        before = context.on_before_act()
        context.on_after_act(assistant("x"))
        context.on_after_step("obs 3", {})
        after = context.on_before_act()
        assert all(a is b for a, b in zip(before, after, strict=False))

    def test_the_recorded_message_is_not_changed(self) -> None:
        context = TruncatedThinkingContext()
        play(context, 0)
        message = assistant("<think>x</think>y")
        context.on_after_act(message)
        context.on_after_step("obs", {})
        context.on_before_act()
        assert message == assistant("<think>x</think>y")

    def test_a_placeholder_can_stand_for_the_thinking(self) -> None:
        context = TruncatedThinkingContext(placeholder="[...]")
        play(context, 1)
        assert contents(context)[2] == "[...]act 0"

    @pytest.mark.parametrize(
        ("text", "left"),
        [
            ("plain", "plain"),
            ("<think>a</think>b", "b"),
            ("<think>a</think>\n\n b", "b"),
            ("x <think>a</think>b<think>c</think>d", "x bd"),
            ("a</think>b", "b"),
            ("<think>never closed", ""),
            ("b <think>never closed", "b "),
            ("<think></think>", ""),
        ],
    )
    def test_what_counts_as_thinking(self, text: str, left: str) -> None:
        assert without_thinking(text) == left

    @given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "<"])).map("".join))
    def test_no_thinking_block_is_left_of_any_text(self, text: str) -> None:
        assert "<think>" not in without_thinking(text)

    def test_a_megabyte_of_tags_is_trimmed_too(self) -> None:
        assert without_thinking("<think>" * 100_000 + "</think>" * 100_000) != ""
        assert without_thinking("<think></think>" * 60_000 + "b") == "b"


class TestWindowedDialog:
    def test_the_system_prompt_and_the_last_turns_are_shown(self) -> None:
        context = WindowedDialog(max_turns=2)
        play(context, 3)
        assert contents(context) == ["sys", "obs 2", "<think>thought 2</think>act 2", "obs 3"]

    def test_the_first_observation_can_be_kept(self) -> None:
        context = WindowedDialog(max_turns=1, keep_first=True)
        play(context, 3)
        assert contents(context) == ["sys", "obs 0", "obs 3"]

    def test_within_the_window_everything_is_shown(self) -> None:
        windowed, full = WindowedDialog(max_turns=4), FullDialog()
        play(windowed, 3)
        play(full, 3)
        assert contents(windowed) == contents(full)

    def test_the_full_history_is_kept(self) -> None:
        context = WindowedDialog(max_turns=1)
        play(context, 3)
        assert len(context.history) == 8

    def test_a_turn_keeps_its_tool_messages(self) -> None:
        context = WindowedDialog(max_turns=1)
        play(context, 1)
        context.on_after_act(assistant("call"))
        context.on_tool_results([tool("4")])
        assert contents(context) == ["sys", "obs 1", "call", "4"]

    def test_a_window_of_nothing_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="at least 1"):
            WindowedDialog(max_turns=0)


class TestAnyContext:
    @pytest.mark.parametrize("spec", CONTEXTS)
    @given(events=EVENTS)
    def test_roles_are_sound_whatever_happens(
        self, spec: Any, events: list[tuple[str, str]]
    ) -> None:
        context = make_context(spec)
        context.reset("sys")
        for kind, text in events:
            if kind == "obs":
                context.on_after_step(text, {})
            elif kind == "act":
                context.on_after_act(assistant(text))
            elif kind == "tool":
                context.on_tool_results([tool(text)])
            shown = context.on_before_act()
            assert [m["role"] for m in shown].count("system") == 1
            assert shown[0]["role"] == "system"
            assert not any(m["role"] == "user" and not m["content"] for m in shown)

    def test_contexts_are_made_from_json(self) -> None:
        assert type(make_context("full_dialog")) is FullDialog
        assert type(make_context({"kind": "truncated_thinking"})) is TruncatedThinkingContext
        windowed = make_context({"kind": "windowed", "max_turns": 3})
        assert isinstance(windowed, WindowedDialog)
        assert windowed.max_turns == 3

    def test_every_call_makes_a_new_one(self) -> None:
        assert make_context("full_dialog") is not make_context("full_dialog")

    def test_an_unknown_kind_answers_with_the_nearest(self) -> None:
        with pytest.raises(UnknownNameError, match="full_dialog"):
            make_context("full_dialogue")

    @pytest.mark.parametrize("spec", [{}, {"kind": "windowed", "turns": 3}])
    def test_a_spec_that_cannot_be_made_is_a_configuration_error(self, spec: Any) -> None:
        with pytest.raises(ConfigError):
            make_context(spec)
