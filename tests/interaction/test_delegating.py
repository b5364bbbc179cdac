from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ludic.agents import Agent, ReActAgent, Tool
from ludic.errors import ConfigError, ProtocolError
from ludic.inference.scripted_client import ScriptedCall
from ludic.interaction import DelegatingProtocol, RunSpec, SubAgent
from ludic.types import Rollout, TruncationReason
from tests.agents.scripted import move, scripted_agent, tool_call
from tests.interaction.test_single_agent import check_soundness
from tests.interaction.worlds import Countdown, RaisingEnv
from tests.virtual_time import virtual_time

Factory = Callable[[Sequence[Tool]], Agent]


def thinker(script: Any, **kwargs: Any) -> Factory:
    """Makes agents that say the script and may delegate."""

    def make(external_tools: Sequence[Tool]) -> ReActAgent:
        return scripted_agent(script, ReActAgent, external_tools=external_tools, **kwargs)

    return make


def helper(script: Any, **kwargs: Any) -> SubAgent:
    return SubAgent("Solves a subtask.", thinker(script), **kwargs)


async def play(protocol: DelegatingProtocol, env: Any = None, **spec: Any) -> list[Rollout]:
    spec = {"env_seed": 3, "sampling_seed": 7, **spec}
    rollouts = await protocol.run(env or Countdown(1), RunSpec("e1", **spec))
    for rollout in rollouts:
        check_soundness(rollout)
    return rollouts


def by_depth(parent: str, child: str, grandchild: str) -> Callable[[ScriptedCall], str]:
    """One policy for all: what it says depends on the task that it sees, and each delegates once
    before it answers."""

    def say(call: ScriptedCall) -> str:
        if "1 left" in call.text:
            return parent if call.index == 0 else move("done")
        if "outer" in call.text.rpartition("</tools>")[2]:
            return child if call.index == 0 else move("child")
        return grandchild

    return say


async def test_a_delegation_of_depth_two_gives_three_linked_rollouts() -> None:
    policy = by_depth(
        tool_call("helper", task="outer"), tool_call("helper", task="inner"), move("grandchild")
    )
    protocol = DelegatingProtocol(thinker(policy), {"helper": helper(policy)}, max_depth=2)
    parent, child, grandchild = await play(protocol)

    assert parent.parent_id is None
    assert child.parent_id == parent.id == "e1/agent"
    assert grandchild.parent_id == child.id == "e1/agent/helper-0"
    assert grandchild.id == "e1/agent/helper-0/helper-0"
    assert [r.meta["depth"] for r in (parent, child, grandchild)] == [0, 1, 2]
    assert [r.agent_id for r in (parent, child, grandchild)] == ["agent", "helper", "helper"]
    assert {r.episode_id for r in (parent, child, grandchild)} == {"e1"}

    assert grandchild.env_steps[0].obs == "inner"
    assert grandchild.env_steps[0].action == "grandchild"
    assert child.agent_steps[0].tool_messages[0]["content"] == "grandchild"
    assert child.env_steps[0].action == "child"
    assert parent.agent_steps[0].tool_messages[0]["content"] == "child"
    assert parent.env_steps[0].action == "done"
    assert all(r.terminated for r in (parent, child, grandchild))


async def test_every_sub_agent_has_seeds_of_its_own() -> None:
    twice = "\n".join([tool_call("helper", task="a"), tool_call("helper", task="b")])
    protocol = DelegatingProtocol(
        thinker([twice, move("x")]), {"helper": helper([move("y")])}, max_sub_agents=4
    )
    rollouts = await play(protocol)
    assert [r.id for r in rollouts] == ["e1/agent", "e1/agent/helper-0", "e1/agent/helper-1"]
    seeds = [s.sampling["seed"] for r in rollouts for s in r.agent_steps]
    assert len(set(seeds)) == 4
    assert len({r.sampling_seed for r in rollouts}) == 3
    again = await play(protocol)
    assert [r.sampling_seed for r in again] == [r.sampling_seed for r in rollouts]


async def test_at_the_bottom_nobody_is_offered_to_delegate() -> None:
    seen: list[int] = []

    def make(external_tools: Sequence[Tool]) -> Agent:
        seen.append(len(external_tools))
        return thinker([tool_call("helper", task="more"), move("y")])(external_tools)

    protocol = DelegatingProtocol(
        thinker([tool_call("helper", task="a"), move("x")]),
        {"helper": SubAgent("Solves.", make)},
    )
    _, child = await play(protocol)
    assert seen == [0]
    assert "there is no tool 'helper'" in child.agent_steps[0].tool_messages[0]["content"]


async def test_the_number_of_sub_agents_is_bounded_and_the_caller_is_told() -> None:
    calls = "\n".join(tool_call("helper", task=str(i)) for i in range(4))
    protocol = DelegatingProtocol(
        thinker([calls, move("x")]), {"helper": helper([move("y")])}, max_sub_agents=2
    )
    rollouts = await play(protocol)
    assert len(rollouts) == 3
    told = [m["content"] for m in rollouts[0].agent_steps[0].tool_messages]
    assert told[:2] == ["y", "y"]
    assert all("no more than 2 sub-agents" in text for text in told[2:])


async def test_sub_agents_share_the_parents_reward_or_have_only_their_own() -> None:
    def protocol(**kwargs: Any) -> DelegatingProtocol:
        return DelegatingProtocol(
            thinker([tool_call("helper", task="a"), move("x")]),
            {"helper": helper([move("y")])},
            **kwargs,
        )

    parent, child = await play(protocol())
    assert parent.total_reward == 1.25
    assert child.env_steps[-1].reward_components == {"env": 0.0, "parser": 0.25, "parent": 1.25}
    parent, child = await play(protocol(child_reward="none"))
    assert child.env_steps[-1].reward_components == {"env": 0.0, "parser": 0.25}


async def test_a_sub_agent_that_gives_no_answer_is_told_to_its_caller() -> None:
    protocol = DelegatingProtocol(
        thinker([tool_call("helper", task="a"), move("x")]),
        {"helper": helper(["no idea"] * 3, max_steps=3)},
    )
    parent, child = await play(protocol)
    assert parent.agent_steps[0].tool_call_errors == ("the sub-agent 'helper' did not answer",)
    assert child.truncation_reason is TruncationReason.MAX_STEPS
    assert child.error is None
    assert parent.terminated


async def test_a_sub_agent_that_fails_costs_its_own_rollout_and_the_parent_goes_on() -> None:
    def make_env(task: str) -> Any:
        return RaisingEnv(at=1)

    protocol = DelegatingProtocol(
        thinker([tool_call("helper", task="a"), move("x")]),
        {"helper": helper([move("y")], make_env=make_env)},
    )
    parent, child = await play(protocol)
    assert parent.error is None
    assert parent.terminated
    assert "the dice are lost" in parent.agent_steps[0].tool_messages[0]["content"]
    assert child.error is not None
    assert child.truncation_reason is TruncationReason.ERROR
    assert "parent" not in child.env_steps[-1].reward_components


async def test_when_the_parent_fails_its_sub_agents_rollouts_carry_the_cause() -> None:
    protocol = DelegatingProtocol(
        thinker([tool_call("helper", task="a"), move("x")]), {"helper": helper([move("y")])}
    )
    parent, child = await play(protocol, RaisingEnv(at=1))
    assert parent.error is not None
    assert child.error is not None
    assert "the parent's episode failed" in child.error
    assert child.terminated, "its own ending stays what it was"


async def test_the_parents_deadline_ends_its_sub_agents_too() -> None:
    class Hanging(Countdown):
        async def env_step(self, action: str) -> Any:  # type: ignore[override]
            await asyncio.sleep(3600)

    children: list[Hanging] = []

    def make_env(task: str) -> Any:
        children.append(Hanging(1))
        return children[-1]

    protocol = DelegatingProtocol(
        thinker([tool_call("helper", task="a"), move("x")]),
        {"helper": helper([move("y")], make_env=make_env)},
    )
    with virtual_time():
        parent, child = await play(protocol, episode_timeout_s=60)
    assert parent.truncation_reason is TruncationReason.DEADLINE
    assert len(parent.agent_steps) == 1
    assert parent.error is not None
    assert "DeadlineError" in parent.error
    assert child.error is not None
    assert len(child.agent_steps) == 1, "what was sampled is kept"
    assert children[0].closed == 1


async def test_a_sub_agent_past_its_callers_patience_is_broken_off_and_says_so() -> None:
    async def hang(call: Any) -> str:
        await asyncio.sleep(3600)
        return ""

    protocol = DelegatingProtocol(
        thinker([tool_call("helper", task="a"), move("x")], external_tool_timeout_s=60),
        {"helper": helper(hang)},
    )
    with virtual_time():
        parent, child = await play(protocol)
    assert parent.terminated
    assert parent.error is None
    assert parent.agent_steps[0].tool_call_errors == ("tool 'helper' did not answer within 60 s",)
    assert child.error == "ProtocolError: the sub-agent 'helper' was broken off by its caller"


async def test_cancelling_closes_the_sub_agents_environments_too() -> None:
    started = asyncio.Event()
    children: list[Countdown] = []

    def make_env(task: str) -> Any:
        children.append(Countdown(1))
        return children[-1]

    async def hang(call: Any) -> str:
        started.set()
        await asyncio.sleep(3600)
        return ""

    env = Countdown(1)
    protocol = DelegatingProtocol(
        thinker([tool_call("helper", task="a")]), {"helper": helper(hang, make_env=make_env)}
    )
    task = asyncio.create_task(protocol.run(env, RunSpec("e1")))
    await asyncio.wait_for(started.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.closed == 1
    assert children[0].closed == 1


async def test_a_sub_agent_with_the_parents_name_is_refused() -> None:
    protocol = DelegatingProtocol(thinker([move("x")]), {"agent": helper([move("y")])})
    with pytest.raises(ProtocolError, match="named 'agent', as the parent is"):
        await play(protocol)


async def test_a_parent_that_cannot_call_tools_is_refused() -> None:
    protocol = DelegatingProtocol(lambda tools: scripted_agent([""]), {"helper": helper([""])})
    with pytest.raises(ProtocolError, match="cannot call tools"):
        await play(protocol)


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"sub_agents": {}}, "at least one kind"),
        ({"max_depth": 0}, "max_depth=0"),
        ({"max_sub_agents": 0}, "max_sub_agents=0"),
        ({"child_reward": "half"}, "child_reward='half'"),
    ],
)
def test_settings_that_cannot_work_are_refused(kwargs: dict[str, Any], complaint: str) -> None:
    settings = {"sub_agents": {"helper": helper([""])}, **kwargs}
    with pytest.raises(ConfigError, match=complaint):
        DelegatingProtocol(thinker([""]), **settings)
