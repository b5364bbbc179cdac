from __future__ import annotations

import pytest
from msgspec.structs import replace

from ludic.agents import ActResult
from ludic.errors import AgentError
from ludic.interaction import AgentTrack, RunSpec
from ludic.interaction.collector import UNREADABLE
from ludic.parsers import ParseResult
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    StepOutcome,
    TruncationReason,
)


def model_call(turn_index: int = 0) -> AgentStep:
    message = {"role": "assistant", "content": "a"}
    return AgentStep(turn_index, (), message, FinishReason.STOP)  # type: ignore[arg-type]


def acted(calls: int = 1, action: str | None = "a", reward: float = 0.0) -> ActResult:
    return ActResult(tuple(model_call() for _ in range(calls)), ParseResult(action, reward))


def last(track: AgentTrack) -> EnvironmentStep:
    step = track.steps[-1]
    assert isinstance(step, EnvironmentStep)
    return step


def test_a_turn_holds_the_places_of_its_model_calls() -> None:
    track = AgentTrack("a", "e/a")
    track.add_outcome(StepOutcome("x", 0.0), acted(calls=2))
    track.add_outcome(StepOutcome("y", 0.0), acted(calls=1))
    assert [s.turn_index for s in track.steps] == [0, 0, 0, 1, 1]
    assert last(track).agent_steps == (3,)


def test_an_outcome_heard_before_the_first_turn_counts_to_it() -> None:
    track = AgentTrack("a", "e/a")
    track.add_outcome(StepOutcome("x", 0.5))
    track.add_outcome(StepOutcome("y", 0.0), acted())
    track.add_outcome(StepOutcome("z", -1.0, terminated=True))
    rollout = track.build(RunSpec("e"), task_key=None, error=None)
    (turn,) = rollout.turns()
    assert turn.reward == -0.5
    assert [s.agent_steps for s in rollout.env_steps] == [(), (1,), ()]


def test_cutting_moves_no_flag_of_an_episode_that_is_over() -> None:
    track = AgentTrack("a", "e/a")
    track.add_outcome(StepOutcome("x", 0.0, terminated=True), acted())
    track.cut(TruncationReason.MAX_STEPS)
    track.fail(TruncationReason.ERROR)
    assert last(track).terminated
    assert not last(track).truncated


def test_an_empty_observation_leaves_what_was_last_seen() -> None:
    track = AgentTrack("a", "e/a")
    track.obs = "opening"
    track.add_outcome(StepOutcome("", 0.0), acted())
    assert last(track).next_obs == ""
    assert track.obs == "opening"


def test_components_that_do_not_add_up_are_completed() -> None:
    track = AgentTrack("a", "e/a")
    track.add_outcome(StepOutcome("", 1.0, reward_components={"win": 1.5}), acted(reward=0.25))
    assert last(track).reward_components == {"win": 1.5, "env": -0.5, "parser": 0.25}
    assert last(track).reward == 1.25


def test_an_act_without_a_model_call_is_an_error_that_says_so() -> None:
    track = AgentTrack("a", "e/a")
    with pytest.raises(AgentError, match="agent 'a' acted without a model call"):
        track.add_outcome(StepOutcome("", 0.0), acted(calls=0))


def test_a_bonus_is_a_component_of_the_last_step() -> None:
    track = AgentTrack("a", "e/a")
    track.add_bonus("parent", 1.0)
    assert track.steps == ()
    track.add_outcome(StepOutcome("", 1.0), acted())
    track.add_bonus("parent", 2.0)
    assert last(track).reward == 3.0
    assert last(track).reward_components == {"env": 1.0, "parser": 0.0, "parent": 2.0}


def test_components_that_add_up_but_for_rounding_stay_as_they_are() -> None:
    for reward in (0.3, 3e5):
        track = AgentTrack("a", "e/a")
        parts = {"x": reward / 3, "y": 2 * reward / 3 + reward * 1e-12}
        track.add_outcome(StepOutcome("", reward, reward_components=parts))
        assert last(track).reward_components == parts
    for apart, components in ((1e-9, {"x": -1e-9}), (2e-9, {"x": -2e-9, "env": 2e-9})):
        track = AgentTrack("a", "e/a")
        track.add_outcome(StepOutcome("", 0.0, reward_components={"x": -apart}))
        assert last(track).reward_components == components


def test_components_named_like_ours_are_added_to_ours() -> None:
    track = AgentTrack("a", "e/a")
    named = {"env": 1.5, "parser": 0.5}
    track.add_outcome(StepOutcome("", 1.0, reward_components=named), acted(reward=0.25))
    assert last(track).reward_components == {"env": 0.5, "parser": 0.75}
    assert last(track).reward == 1.25
    assert track.total_reward == 1.25


def test_a_failed_turn_has_the_parsers_reward_and_tells_why() -> None:
    track = AgentTrack("a", "e/a")
    cut = ActResult(
        (replace(model_call(), finish_reason=FinishReason.LENGTH),), ParseResult(None, -0.5)
    )
    feedback, info = track.add_parse_failure(cut)
    assert feedback == UNREADABLE
    assert info == {"parse_error": True, "parse_error_kind": "length"}
    step = last(track)
    assert (step.reward, step.reward_components) == (-0.5, {"parser": -0.5})
    assert (step.stepped, step.action, step.next_obs, step.info) == (False, None, feedback, info)
    assert not track.ended
    assert track.add_parse_failure(acted(action=None))[1]["parse_error_kind"] == "format"
    called = replace(model_call(), tool_messages=({"role": "tool", "content": "x"},))
    calls = ActResult((called,), ParseResult(None, 0.0, "Use a tool no more."))
    feedback, info = track.add_parse_failure(calls)
    assert (feedback, info["parse_error_kind"]) == ("Use a tool no more.", "tool_calls")
    assert [s.turn_index for s in track.steps] == [0, 0, 1, 1, 2, 2]


def test_a_turn_cut_in_its_middle_keeps_its_calls_and_ends_the_episode() -> None:
    track = AgentTrack("a", "e/a")
    track.add_outcome(StepOutcome("x", 0.0), acted())
    track.cut_turn(acted(reward=-1.0), TruncationReason.DEADLINE)
    step = last(track)
    assert (step.stepped, step.truncated, step.terminated) == (False, True, False)
    assert (step.reward, step.truncation_reason) == (-1.0, TruncationReason.DEADLINE)
    assert (step.turn_index, step.agent_steps) == (1, (2,))
    assert track.ended
    assert track.last_action() == "a"
    before = track.steps
    track.cut(TruncationReason.ERROR)
    assert track.steps == before


def test_a_turn_cut_before_its_first_call_leaves_the_flag_on_the_step_before() -> None:
    track = AgentTrack("a", "e/a")
    track.add_outcome(StepOutcome("x", 1.0), acted())
    track.cut_turn(acted(calls=0, action=None), TruncationReason.CONTEXT_WINDOW)
    assert len(track.steps) == 2
    assert last(track).truncation_reason is TruncationReason.CONTEXT_WINDOW
    assert last(track).reward == 1.0
    assert track.ended


def test_an_agent_cut_before_its_first_step_has_one_that_was_not_taken() -> None:
    track = AgentTrack("a", "e/a")
    track.fail(TruncationReason.ERROR)
    assert len(track.steps) == 0
    track.cut(TruncationReason.MAX_STEPS)
    assert len(track.steps) == 1
    step = last(track)
    assert (step.turn_index, step.stepped, step.truncated) == (0, False, True)
    assert track.last_action() is None
    assert track.ended


def test_an_interrupted_turn_keeps_what_was_sampled() -> None:
    track = AgentTrack("a", "e/a")
    track.add_interrupted(())
    assert track.steps == ()
    track.add_interrupted((model_call(), model_call()), "b")
    step = last(track)
    assert (step.agent_steps, step.action, step.stepped) == ((0, 1), "b", False)
    assert not track.ended
    assert track.last_action() is None
    track.fail(TruncationReason.ERROR)
    assert last(track).truncation_reason is TruncationReason.ERROR


@pytest.mark.parametrize(
    ("terminated", "truncated"), [(True, False), (False, True), (False, False)]
)
def test_an_outcome_ends_the_episode_if_it_says_so(terminated: bool, truncated: bool) -> None:
    track = AgentTrack("a", "e/a")
    track.add_outcome(StepOutcome("x", 0.0, terminated=terminated, truncated=truncated), acted())
    assert track.ended is (terminated or truncated)
    assert last(track).stepped
    assert last(track).truncated is truncated
    assert last(track).truncation_reason is (TruncationReason.ENV_LIMIT if truncated else None)
