from __future__ import annotations

import pytest

from ludic.agents import ActResult
from ludic.errors import AgentError
from ludic.interaction import AgentTrack, RunSpec
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
    track.hear_reset("opening")
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
