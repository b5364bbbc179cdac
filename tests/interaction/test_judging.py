"""Reward functions beside the environment's own: any environment can have a judge."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ludic.errors import ConfigError, EnvError
from ludic.inference.judge import judge_reward
from ludic.inference.scripted_client import ScriptedChatClient
from ludic.interaction import MultiAgentProtocol, RunSpec, SingleAgentSyncProtocol
from ludic.registry import make_protocol
from ludic.rewards import Attempt
from ludic.types import Rollout
from tests.agents.scripted import move, scripted_agent, scripted_runtime, tiny_template
from tests.interaction.worlds import Countdown

MOVE = {"kind": "xml", "tag": "move"}
SPEC = RunSpec("e", 1, 2, 10)


def half(attempt: Attempt) -> float:
    return 0.5


async def played(*actions: str, reward: Any) -> Rollout:
    protocol = SingleAgentSyncProtocol(scripted_agent([move(a) for a in actions]), reward)
    (rollout,) = await protocol.run(Countdown(len(actions)), SPEC)
    return rollout


async def test_what_a_function_says_is_added_to_the_last_step() -> None:
    plain, judged = [await played("1", "1", reward=reward) for reward in (None, half)]
    assert judged.total_reward == plain.total_reward + 0.5
    assert [step.reward for step in judged.env_steps[:-1]] == [
        step.reward for step in plain.env_steps[:-1]
    ]
    assert judged.env_steps[-1].reward_components["half"] == 0.5


async def test_it_is_given_the_last_action_and_all_that_came_before() -> None:
    seen: list[Attempt] = []

    def watch(attempt: Attempt) -> float:
        seen.append(attempt)
        return 0.0

    rollout = await played("first", "last", reward=watch)
    (attempt,) = seen
    opening, between = (step.obs for step in rollout.env_steps)
    assert attempt.answer == "last"
    assert attempt.question == f"{opening}\n\n> first\n\n{between}"


async def test_a_model_judges_an_environment_that_knows_nothing_of_it() -> None:
    client = ScriptedChatClient(["Quite good. <score>7</score>"], tiny_template())
    judge = judge_reward(client, tiny_template(), "judge", "Be brief.")
    rollout = await played("1", reward=judge)
    assert rollout.env_steps[-1].reward_components["judge"] == pytest.approx(0.7)
    silent = ScriptedChatClient(["Well."] * 2, tiny_template())
    judge = judge_reward(silent, tiny_template(), "judge", "Be brief.")
    rollout = await played("1", reward=judge)
    assert rollout.error is not None
    assert "<score>n</score>" in rollout.error


async def test_it_is_named_in_json_for_one_agent_or_several() -> None:
    reward = json.loads('[{"kind": "length", "limit": 3, "weight": 0.25, "name": "brief"}]')
    runtime = scripted_runtime(lambda call: move("1"))
    for kind in ("single_agent", "multi_agent"):
        protocol = make_protocol(kind, runtime, parser=MOVE, reward=reward)
        (rollout,) = await protocol.run(Countdown(2), SPEC)
        assert rollout.env_steps[-1].reward_components["brief"] == 0.25
        assert "brief" not in rollout.env_steps[0].reward_components
    with pytest.raises(ConfigError, match="limit"):
        make_protocol("single_agent", runtime, reward={"kind": "length", "long": 3})


async def test_an_agent_that_never_acted_is_not_judged() -> None:
    def never(attempt: Attempt) -> float:
        raise EnvError("there is nothing to judge")

    protocol = MultiAgentProtocol({"agent": scripted_agent(["no move"] * 3)}, reward=never)
    (rollout,) = await protocol.run(Countdown(2), RunSpec("e", 1, 2, 2))
    assert rollout.error is None
