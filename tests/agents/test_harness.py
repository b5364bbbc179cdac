"""The agent for long play: notes, reminders, tools of the environment, a bound on each step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from ludic.agents import HarnessAgent
from ludic.agents.harness import Notes
from ludic.errors import AgentError, ConfigError, ToolError
from ludic.inference.scripted_client import ScriptedCall
from ludic.interaction.factories import build_agent
from ludic.types import StepOutcome
from tests.agents.scripted import move, scripted_agent, scripted_runtime, tiny_template, tool_call
from tests.agents.test_compaction import (
    ASKED,
    compacting,
    compactions,
    longest,
    play,
    prompt,
    said_last,
)
from tests.interaction.worlds import Countdown


async def test_notes_are_numbered_bounded_and_forgotten() -> None:
    notes = Notes(20)
    assert notes.text() == ""
    assert await notes.note("the  key\nis red") == "Note 1 is written."
    with pytest.raises(ToolError, match=r"16 characters, and 6 of 20 are left.*forget"):
        await notes.note("the door is blue")
    assert await notes.note("west") == "Note 2 is written."
    assert notes.text() == "Your notes:\n1. the key is red\n2. west"
    await notes.forget(1)
    await notes.note("east")
    assert notes.text() == "Your notes:\n2. west\n3. east"
    with pytest.raises(ToolError, match="there is no note 1; the notes are: 2, 3"):
        await notes.forget(1)
    with pytest.raises(ToolError, match="empty"):
        await notes.note("  ")
    with pytest.raises(ConfigError, match="max_note_chars=0"):
        Notes(0)


async def test_what_was_noted_survives_every_compaction_and_no_episode() -> None:
    def policy(call: ScriptedCall) -> str:
        if ASKED in said_last(call):
            return "Went on."
        if call.index == 0:
            return tool_call("note", text="the key is red")
        return move("go")

    agent = scripted_agent(
        policy, HarnessAgent, ctx=compacting(1800), remind_after=0, max_note_chars=100
    )
    rollout = await play(agent, Countdown(60))
    assert rollout.error is None
    assert len(compactions(rollout)) >= 3
    last = tiny_template().codec.decode(prompt(rollout.agent_steps[-1]))
    assert "Your notes:\n1. the key is red\n\nSum it up." in last
    agent.reset("Again.")
    assert agent.notes is not None
    assert agent.notes.text() == ""


async def test_full_notes_leave_room_to_go_on_or_the_window_is_refused() -> None:
    def policy(call: ScriptedCall) -> str:
        if ASKED in said_last(call):
            return "Went on."
        return tool_call("note", text="y" * 190) if call.index % 3 == 0 else move("go")

    def agent(window: int) -> HarnessAgent:
        return scripted_agent(
            policy, HarnessAgent, ctx=compacting(window), remind_after=0, max_note_chars=1000
        )

    with pytest.raises(ConfigError, match=r"full notes.*max_note_chars"):
        await play(agent(2200))
    player = agent(2500)
    rollout = await play(player, Countdown(60))
    assert player.notes is not None
    assert player.notes.text().count("y") == 950
    assert rollout.terminated
    assert longest(rollout) <= 2500


def test_notes_are_off_by_a_setting() -> None:
    runtime = scripted_runtime([""])
    agent = build_agent(runtime, agent="harness", notes=False)
    assert agent.tool_request is None
    agent = build_agent(runtime, agent="harness")
    assert agent.tool_request is not None
    names = [tool["function"]["name"] for tool in agent.tool_request.tools]
    assert names == ["note", "forget"]


async def test_it_is_reminded_when_nothing_changes() -> None:
    class Wall(Countdown):
        def env_step(self, action: str) -> StepOutcome:
            outcome = super().env_step(action)
            moved = action == "east"
            return StepOutcome("A door." if moved else "A wall.", 0.0, truncated=outcome.terminated)

    script = [move("north")] * 3 + ["what?"] * 2 + [move("north")] + [move("east")] * 2
    agent = scripted_agent(script, HarnessAgent, remind_after=2, notes=False)
    rollout = await play(agent, Wall(6))
    heard = [s.new_messages[-1]["content"] for s in rollout.agent_steps]
    reminded = [n for n, text in enumerate(heard) if "Nothing has changed for" in text]
    assert reminded == [3, 5], "after two walls more, and after two that could not be read"
    assert "for 4 steps" in heard[5]
    said = {"remind_after": 1, "reminder": 'For {steps} steps: write {"to": …}.'}
    agent = scripted_agent(script, HarnessAgent, notes=False, **said)
    agent.on_env_reset("A wall.", {})
    agent.on_after_step("A wall.", {})
    assert agent.ctx.on_before_act()[-1]["content"].endswith('For 1 steps: write {"to": …}.')
    with pytest.raises(AgentError, match="remind_after=-1"):
        scripted_agent([""], HarnessAgent, remind_after=-1)


class Levers(Countdown):
    """Offers its action as a tool."""

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Mapping[str, Any]]:
        obs, info = super().env_reset(seed=seed)
        parameters = {"type": "object", "properties": {"which": {"type": "string"}}}
        function = {"name": "pull", "description": "Pulls a lever.", "parameters": parameters}
        return obs, {**info, "tools": [{"type": "function", "function": function}]}


async def test_a_call_of_the_environments_tool_is_the_action() -> None:
    both = tool_call("note", text="left") + "\n" + tool_call("pull", which="left")
    twice = tool_call("pull", which="a") + "\n" + tool_call("pull", which="b")
    agent = scripted_agent([both, move("stay"), twice], HarnessAgent)
    env = Levers(3)
    rollout = await play(agent, env)
    assert rollout.error is None
    actions = [json.loads(a) if a.startswith("{") else a for a in env.actions]
    assert actions == [
        {"name": "pull", "arguments": {"which": "left"}},
        "stay",
        {"name": "pull", "arguments": {"which": "a"}},
    ]
    first, _, last = rollout.agent_steps
    assert [m["content"] for m in first.tool_messages] == ["Note 1 is written.", "Done."]
    assert "one action a step" in last.tool_messages[1]["content"]
    assert '"pull"' in tiny_template().codec.decode(prompt(first))
    assert [s.reward_components["parser"] for s in rollout.env_steps] == [0.0, 0.25, 0.0]


async def test_a_tool_of_both_is_refused() -> None:
    def pull(which: str) -> str:
        """Pulls."""
        return which

    rollout = await play(scripted_agent([""], HarnessAgent, tools=[pull]), Levers(1))
    assert rollout.error is not None
    assert "tools of the agent and of the environment" in rollout.error


async def test_a_step_has_a_budget_of_calls() -> None:
    agent = scripted_agent(
        [tool_call("note", text="more")], HarnessAgent, max_rounds=3, client={"cycle": True}
    )
    rollout = await play(agent, Countdown(2), max_steps=2)
    assert [len(step.agent_steps) for step in rollout.env_steps] == [3, 3]
    assert all(step.info["parse_error"] for step in rollout.env_steps)
