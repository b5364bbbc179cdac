from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.agents import Agent, ToolAgent
from ludic.envs import LudicEnv, build_env
from ludic.errors import ConfigError, ProtocolError
from ludic.inference import SamplingConfig
from ludic.interaction import RunSpec, SingleAgentSyncProtocol
from ludic.parsers import ParseResult
from ludic.seeding import derive_seed
from ludic.types import (
    EnvironmentStep,
    EnvSpec,
    Rollout,
    StepOutcome,
    TruncationReason,
    from_json,
    to_json,
)
from tests.agents.scripted import move, scripted_agent, tool_call
from tests.interaction.worlds import (
    AnsweringEnv,
    Countdown,
    Duel,
    Endless,
    HangingEnv,
    RaisingEnv,
)
from tests.virtual_time import virtual_time

NOTHING = "I have no idea."


async def play(agent: Agent, env: LudicEnv[Any, Any, Any], **spec: Any) -> Rollout:
    spec = {"sampling_seed": 7, "env_seed": 3, **spec}
    (rollout,) = await SingleAgentSyncProtocol(agent).run(env, RunSpec("e1", **spec))
    check_soundness(rollout)
    return rollout


def check_soundness(rollout: Rollout) -> None:
    """What holds for every rollout."""
    assert from_json(Rollout, to_json(rollout)) == rollout
    for position, step in enumerate(rollout.steps):
        if not isinstance(step, EnvironmentStep):
            continue
        assert all(p < position for p in step.agent_steps)
        calls = [rollout.steps[p] for p in step.agent_steps]
        assert all(c.kind == "agent" and c.turn_index == step.turn_index for c in calls)
        if step.reward_components:
            assert step.reward == pytest.approx(sum(step.reward_components.values()))
        assert step.truncated == (step.truncation_reason is not None)
        assert not (step.terminated and step.truncated)
    flagged = [s for s in rollout.env_steps if s.terminated or s.truncated]
    assert flagged in ([], list(rollout.steps[-1:]))


async def test_an_episode_runs_until_the_environment_ends_it() -> None:
    env = Countdown(2)
    rollout = await play(scripted_agent([move("a"), move("b")]), env)
    assert env.actions == ["a", "b"]
    assert env.seeds == [3]
    assert [s.kind for s in rollout.steps] == ["agent", "environment"] * 2
    first, second = rollout.env_steps
    assert (first.obs, first.action, first.next_obs) == ("2 left", "a", "1 left")
    assert (second.obs, second.action, second.next_obs) == ("1 left", "b", "0 left")
    assert first.agent_steps == (0,)
    assert second.agent_steps == (2,)
    assert not first.terminated
    assert second.terminated
    assert rollout.terminated
    assert not rollout.truncated
    assert (rollout.id, rollout.episode_id, rollout.agent_id) == ("e1/agent", "e1", "agent")
    assert (rollout.env_seed, rollout.sampling_seed) == (3, 7)
    assert rollout.task_key == "countdown-2"
    assert rollout.error is None


async def test_the_rewards_of_parser_and_environment_are_components_of_one_total() -> None:
    rollout = await play(scripted_agent([move("a"), move("b")]), Countdown(2))
    assert [s.reward for s in rollout.env_steps] == [1.25, 2.25]
    assert rollout.env_steps[0].reward_components == {"env": 1.0, "parser": 0.25}


async def test_the_environments_own_components_are_kept_and_the_rest_is_named() -> None:
    outcome = StepOutcome("", 3.0, terminated=True, reward_components={"win": 2.0})
    env = AnsweringEnv({"agent": outcome})
    rollout = await play(scripted_agent([move("a")]), env)
    assert rollout.env_steps[0].reward_components == {"win": 2.0, "env": 1.0, "parser": 0.25}
    assert rollout.total_reward == 3.25


async def test_a_parse_failure_is_not_a_move() -> None:
    env = Countdown(1)
    agent = scripted_agent([NOTHING, move("a")])
    rollout = await play(agent, env)
    assert env.actions == ["a"]
    failed, moved = rollout.env_steps
    assert failed.stepped is False
    assert failed.action is None
    assert failed.info["parse_error"] is True
    assert failed.info["parse_error_kind"] == "format"
    assert failed.reward == -0.5
    assert failed.reward_components == {"parser": -0.5}
    assert moved.stepped
    assert "parse_error" not in moved.info
    assert [t.index for t in rollout.turns()] == [0, 1]


@given(
    answers=st.lists(st.booleans(), min_size=1, max_size=8),
    steps=st.integers(1, 5),
    max_steps=st.integers(1, 8),
)
def test_whatever_parses_or_not_only_moves_reach_the_environment(
    answers: list[bool], steps: int, max_steps: int
) -> None:
    script = [move(str(i)) if ok else NOTHING for i, ok in enumerate(answers)]
    env = Countdown(steps)
    agent = scripted_agent(script, client={"cycle": True})
    rollout = asyncio.run(play(agent, env, max_steps=max_steps))

    taken = [s for s in rollout.env_steps if s.stepped]
    assert [s.action for s in taken] == env.actions
    assert len(rollout.env_steps) == len(rollout.agent_steps) <= max_steps
    assert rollout.terminated == (len(taken) == steps)
    assert rollout.truncated == (not rollout.terminated)
    failures = len(rollout.env_steps) - len(taken)
    earned = sum(range(1, len(taken) + 1)) + 0.25 * len(taken) - 0.5 * failures
    assert rollout.total_reward == pytest.approx(earned)
    assert [t.index for t in rollout.turns()] == list(range(len(rollout.env_steps)))


async def test_the_parsers_feedback_goes_into_the_context() -> None:
    rollout = await play(scripted_agent([NOTHING, move("a")]), Countdown(1))
    feedback = rollout.env_steps[0].next_obs
    assert "<move>" in feedback
    assert [m["content"] for m in rollout.agent_steps[1].new_messages] == [feedback]
    assert rollout.env_steps[1].obs == feedback


async def test_a_parser_without_feedback_gets_a_sentence_all_the_same() -> None:
    replies = iter([ParseResult(None, -1.0), ParseResult("a")])
    agent = scripted_agent(["x", "y"], parser=lambda text: next(replies))
    rollout = await play(agent, Countdown(1))
    assert "could not be read" in rollout.agent_steps[1].new_messages[0]["content"]


async def test_a_completion_cut_by_length_is_a_parse_failure_of_its_own_kind() -> None:
    env = Countdown(1)
    agent = scripted_agent([move("abcdefgh"), move("a")], sampling=SamplingConfig(max_tokens=16))
    rollout = await play(agent, env)
    cut = rollout.env_steps[0]
    assert cut.info == {"parse_error": True, "parse_error_kind": "length"}
    assert not cut.stepped
    assert not cut.truncated, "the model's finish reason is no ending of the episode"
    assert env.actions == ["a"]


async def test_a_turn_spent_on_tools_alone_is_a_parse_failure_of_its_own_kind() -> None:
    def look() -> str:
        """Looks."""
        return "nothing"

    agent = scripted_agent([tool_call("look")] * 3 + [move("a")], ToolAgent, tools=[look])
    agent.max_tool_rounds = 2
    rollout = await play(agent, Countdown(1))
    assert rollout.env_steps[0].info["parse_error_kind"] == "tool_calls"
    assert rollout.env_steps[0].reward == -0.5
    assert rollout.env_steps[0].agent_steps == (0, 1, 2)
    assert rollout.env_steps[1].action == "a"


async def test_a_limit_of_the_environment_is_a_truncation_with_that_reason() -> None:
    rollout = await play(scripted_agent([move("a")]), Countdown(1, ends="truncated"))
    assert not rollout.terminated
    assert rollout.truncation_reason is TruncationReason.ENV_LIMIT
    assert rollout.error is None


async def test_max_steps_truncates_the_last_step_that_happened() -> None:
    rollout = await play(scripted_agent([move("a")] * 3), Countdown(9), max_steps=3)
    assert [s.truncation_reason for s in rollout.env_steps] == [
        None,
        None,
        TruncationReason.MAX_STEPS,
    ]
    assert rollout.error is None


async def test_parse_failures_count_towards_max_steps() -> None:
    rollout = await play(scripted_agent([NOTHING] * 3), Countdown(9), max_steps=3)
    assert len(rollout.env_steps) == 3
    assert rollout.truncation_reason is TruncationReason.MAX_STEPS
    assert not rollout.env_steps[-1].stepped


async def test_an_environment_that_ends_in_the_last_allowed_step_is_terminated() -> None:
    rollout = await play(scripted_agent([move("a")] * 2), Countdown(2), max_steps=2)
    assert rollout.terminated
    assert not rollout.truncated


async def test_a_full_context_is_an_ending_on_the_last_step_that_happened() -> None:
    agent = scripted_agent([move("x" * 40)] * 9, client={"max_context_tokens": 250})
    rollout = await play(agent, Countdown(9))
    assert rollout.truncation_reason is TruncationReason.CONTEXT_WINDOW
    assert rollout.error is None
    last = rollout.steps[-1]
    assert last.kind == "environment"
    assert last.truncated
    assert last.agent_steps != (), "no step was made up to hold the ending"
    assert 1 < len(rollout.env_steps) < 9


async def test_a_first_prompt_that_does_not_fit_still_gives_a_rollout_with_its_ending() -> None:
    agent = scripted_agent([move("a")], client={"max_context_tokens": 5})
    rollout = await play(agent, Countdown(9))
    assert rollout.truncation_reason is TruncationReason.CONTEXT_WINDOW
    (step,) = rollout.steps
    assert step.kind == "environment"
    assert not step.stepped
    assert step.agent_steps == ()


async def test_a_context_that_fills_up_inside_a_turn_keeps_its_model_calls() -> None:
    def read() -> str:
        """Reads."""
        return "x" * 3000

    agent = scripted_agent(
        [tool_call("read"), move("a")],
        ToolAgent,
        tools=[read],
        client={"max_context_tokens": 2000},
    )
    rollout = await play(agent, Countdown(1))
    assert rollout.truncation_reason is TruncationReason.CONTEXT_WINDOW
    assert [s.kind for s in rollout.steps] == ["agent", "environment"]
    assert rollout.env_steps[0].agent_steps == (0,)
    assert not rollout.env_steps[0].stepped


async def test_the_agents_own_system_prompt_goes_before_the_environments() -> None:
    rollout = await play(scripted_agent([move("a")]), Countdown(1))
    assert rollout.agent_steps[0].new_messages[0]["content"] == "Count down."
    rollout = await play(scripted_agent([move("a")], system_prompt="Mine."), Countdown(1))
    assert rollout.agent_steps[0].new_messages[0]["content"] == "Mine."


async def test_seeds_are_disjoint_over_episodes_and_calls_and_repeat_with_their_roots() -> None:
    async def seeds(root: int) -> list[int]:
        rollout = await play(scripted_agent([move("a")] * 3), Countdown(3), sampling_seed=root)
        return [s.sampling["seed"] for s in rollout.agent_steps]

    first, second = await seeds(1), await seeds(2)
    assert len({*first, *second}) == 6
    assert await seeds(1) == first
    assert first[2] == derive_seed(derive_seed(1, "agent", "agent"), "call", 2)


async def test_an_environment_that_raises_costs_its_episode_and_nothing_else() -> None:
    env = RaisingEnv(at=2)
    rollout = await play(scripted_agent([move("a")] * 5), env)
    assert rollout.error is not None
    assert "the dice are lost" in rollout.error
    assert rollout.truncation_reason is TruncationReason.ERROR
    broken = rollout.env_steps[-1]
    assert (broken.action, broken.stepped, broken.reward) == ("a", False, 0.0)
    assert rollout.env_steps[0].reward == 1.25
    assert env.closed == 1


async def test_a_failure_before_anything_happened_still_gives_a_rollout_with_its_cause() -> None:
    rollout = await play(scripted_agent([move("a")]), RaisingEnv(at=0))
    assert rollout.steps == ()
    assert rollout.error is not None
    assert "the dice are lost" in rollout.error


async def test_a_request_that_fails_costs_its_episode_and_keeps_the_calls_before_it() -> None:
    def look() -> str:
        """Looks."""
        return "nothing"

    agent = scripted_agent(
        [move("a"), tool_call("look"), move("b")],
        ToolAgent,
        tools=[look],
        client={"fault": lambda call: ConnectionError("gone") if call.index == 2 else None},
    )
    rollout = await play(agent, Countdown(5))
    assert rollout.error == "ConnectionError: gone"
    assert [s.kind for s in rollout.steps] == ["agent", "environment", "agent", "environment"]
    assert rollout.truncation_reason is TruncationReason.ERROR


async def test_a_step_past_its_deadline_ends_the_episode_with_that_reason() -> None:
    env = HangingEnv(3)
    with virtual_time():
        rollout = await play(scripted_agent([move("a")]), env, step_timeout_s=60)
    assert rollout.truncation_reason is TruncationReason.DEADLINE
    assert rollout.error is not None
    assert "waited 60 s" in rollout.error
    assert env.closed == 1


async def test_an_episode_past_its_deadline_ends_with_that_reason() -> None:
    async def slow(call: Any) -> str:
        if call.index == 1:
            await asyncio.sleep(3600)
        return move("a")

    env = Countdown(5)
    with virtual_time():
        rollout = await play(scripted_agent(slow), env, episode_timeout_s=60)
    assert rollout.truncation_reason is TruncationReason.DEADLINE
    assert rollout.error is not None
    assert "the end of the episode from e1" in rollout.error
    assert len(rollout.env_steps) == 1
    assert env.closed == 1


async def test_cancelling_an_episode_propagates_and_closes_the_environment() -> None:
    started = asyncio.Event()

    async def slow(call: Any) -> str:
        started.set()
        await asyncio.sleep(3600)
        return ""

    env = Countdown(5)
    task = asyncio.create_task(play(scripted_agent(slow), env))
    await asyncio.wait_for(started.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.closed == 1


async def test_the_environment_is_closed_once_after_an_ordinary_episode() -> None:
    env = Countdown(1)
    await play(scripted_agent([move("a")]), env)
    assert env.closed == 1


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"agent": StepOutcome("", 0.0), "ghost": StepOutcome("", 1.0)}, "ghost"),
        ({}, "no outcome"),
        (None, "returned"),
        ({"agent": StepOutcome("", float("nan"))}, "nan"),
        ({"agent": StepOutcome("", float("inf"), terminated=True)}, "inf"),
        ({"agent": StepOutcome("", 0.0, reward_components={"x": float("nan")})}, "nan"),
        ({"agent": StepOutcome("", 0.0, terminated=True, truncated=True)}, "both"),
        ({"agent": "won"}, "StepOutcome"),
    ],
)
async def test_an_environment_that_breaks_its_contract_costs_its_episode_and_gives_no_reward(
    answer: Any, complaint: str
) -> None:
    rollout = await play(scripted_agent([move("a")]), AnsweringEnv(answer))
    assert rollout.error is not None
    assert rollout.error.startswith("EnvError")
    assert complaint in rollout.error
    assert rollout.total_reward == 0.0
    assert rollout.truncation_reason is TruncationReason.ERROR


async def test_a_parser_with_a_reward_that_is_no_number_costs_its_episode() -> None:
    agent = scripted_agent(["x"], parser=lambda text: ParseResult("a", float("nan")))
    rollout = await play(agent, Countdown(1))
    assert rollout.error is not None
    assert "finite" in rollout.error
    assert rollout.total_reward == 0.0


@pytest.mark.parametrize("returned", [None, "a", ("a", 1.0)])
async def test_a_parser_that_returns_no_result_is_told_what_to_return(returned: Any) -> None:
    rollout = await play(scripted_agent(["x"], parser=lambda text: returned), Countdown(1))
    assert str(rollout.error).startswith("AgentError: act() of agent 'agent' must return")
    assert str(rollout.error).endswith(f"ParseResult, not {returned!r}")
    assert len(rollout.agent_steps) == 1


async def test_an_act_that_forgets_its_result_is_told_what_to_return() -> None:
    class Forgetful(Agent):
        async def act(self) -> None:  # type: ignore[override]
            await super().act()

    rollout = await play(scripted_agent(["x"], Forgetful), Countdown(1))
    assert "must return an ActResult" in str(rollout.error)
    assert len(rollout.agent_steps) == 1


async def test_a_parser_that_raises_costs_its_episode() -> None:
    def parser(text: str) -> ParseResult:
        raise IndexError("no such group")

    rollout = await play(scripted_agent(["x"], parser=parser), Countdown(1))
    assert str(rollout.error).startswith("IndexError: no such group (")
    assert len(rollout.agent_steps) == 1


@pytest.mark.parametrize("make", [Duel, lambda: Endless(1)])
async def test_an_environment_with_several_agents_is_refused_with_advice(
    make: Callable[[], LudicEnv[Any, Any, Any]],
) -> None:
    with pytest.raises(ProtocolError, match="use MultiAgentProtocol"):
        await SingleAgentSyncProtocol(scripted_agent([""])).run(make(), RunSpec("e"))


async def test_no_steps_at_all_is_an_error_of_configuration() -> None:
    with pytest.raises(ConfigError, match="max_steps=0"):
        await play(scripted_agent([""]), Countdown(1), max_steps=0)


async def test_many_episodes_run_at_the_same_time_without_mixing() -> None:
    async def one(i: int) -> Rollout:
        agent = scripted_agent([move(f"{i}-{k}") for k in range(3)], client={"latency_s": 0.001})
        return await play(agent, Countdown(3), sampling_seed=i)

    rollouts = await asyncio.gather(*map(one, range(20)))
    for i, rollout in enumerate(rollouts):
        assert [s.action for s in rollout.env_steps] == [f"{i}-{k}" for k in range(3)]


@pytest.mark.parametrize("shared", ["agent", "context", "environment"])
async def test_what_two_episodes_at_a_time_would_mix_is_refused(shared: str) -> None:
    client = {"latency_s": 0.001, "cycle": True}
    agents = [scripted_agent([move("a"), move("b")], client=client) for _ in range(2)]
    envs = [Countdown(2), Countdown(2)]
    if shared == "agent":
        agents[1] = agents[0]
    elif shared == "context":
        agents[1].ctx = agents[0].ctx
    else:
        envs[1] = envs[0]
    first, second = await asyncio.gather(*map(play, agents, envs), return_exceptions=True)
    assert isinstance(first, Rollout)
    assert first.error is None
    assert [s.next_obs for s in first.env_steps] == ["1 left", "0 left"]
    assert isinstance(second, ConfigError)
    assert "in use in an episode under way" in str(second)
    assert envs[0].closed == 1
    again = await play(agents[0], envs[0])  # one after the other is as it was
    assert again.total_reward == first.total_reward


async def test_an_agent_that_is_being_closed_is_still_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = scripted_agent([move("a"), move("b")], client={"cycle": True})
    closing, closed = asyncio.Event(), asyncio.Event()

    async def close() -> None:
        closing.set()
        await closed.wait()

    monkeypatch.setattr(agent, "close", close)
    first = asyncio.create_task(play(agent, Countdown(2)))
    await closing.wait()
    with pytest.raises(ConfigError, match="in use in an episode under way"):
        await asyncio.wait_for(play(agent, Countdown(2)), 10)
    closed.set()
    assert (await first).error is None
    assert (await play(agent, Countdown(2))).error is None


@pytest.mark.integration
async def test_an_environment_in_a_process_of_its_own_is_played_like_any_other() -> None:
    def first_free(call: Any) -> str:
        return move(call.text.rpartition("Free: ")[2].split()[0])

    spec = EnvSpec("tic_tac_toe", {"opponent": "random"})
    here = await play(scripted_agent(first_free), build_env(spec))
    there = await play(scripted_agent(first_free), build_env(spec, isolation="process"))
    assert here == there
    assert here.terminated
