"""Dialogues that outgrow their window: summarised, recorded, trained on, repeated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.agents import Agent, HarnessAgent, ToolAgent
from ludic.agents.compaction import _ADDED
from ludic.context import CompactingDialog, make_context
from ludic.envs import SingleAgentEnv
from ludic.errors import ConfigError
from ludic.inference.sampling import SamplingConfig
from ludic.inference.scripted_client import ScriptedCall
from ludic.interaction import RunSpec, SingleAgentSyncProtocol
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest, replay
from ludic.rollouts.storage import rollout_from_row, rollout_row
from ludic.saw import build_items
from ludic.training import MonteCarloReturn
from ludic.types import AgentStep, EnvironmentStep, ForkReason, Rollout, StepOutcome
from tests.agents.scripted import (
    FORKING_TEMPLATE,
    TOOL_TEMPLATE,
    move,
    scripted_agent,
    scripted_runtime,
    template_of,
    tiny_template,
    tool_call,
)
from tests.interaction.worlds import Countdown
from tests.saw.drawing import drawn_credit, facts_of_items, facts_of_rollouts

ASKED = "Sum it up."
Policy = Callable[[ScriptedCall], str]


class Vault(SingleAgentEnv):
    """Shows a code once and asks for it at the very end."""

    blocking: ClassVar[bool] = False

    def __init__(self, steps: int) -> None:
        self.steps, self.taken = steps, 0

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Mapping[str, Any]]:
        self.taken = 0
        return "The code is 7351. Step 0.", {}

    def env_step(self, action: str) -> StepOutcome:
        self.taken += 1
        if self.taken == self.steps:
            return StepOutcome("", float(action == "7351"), terminated=True)
        asks = " What is the code?" if self.taken == self.steps - 1 else ""
        return StepOutcome(f"Step {self.taken}.{asks}", 0.0)

    def env_current_obs(self) -> str:
        return f"Step {self.taken}."


def said_last(call: ScriptedCall) -> str:
    """What the model was told last."""
    return call.tail(600).rsplit("<|im_start|>user\n", 1)[-1]


def summing(summary: str = "It went on.", answer: str = "go") -> Policy:
    """Answers, and sums up when asked to."""
    return lambda call: summary if ASKED in said_last(call) else move(answer)


def compacting(window: int = 400, **options: Any) -> CompactingDialog:
    options = {"summary_tokens": 40, "keep_turns": 1, "request": ASKED, **options}
    return CompactingDialog(window, **options)


async def play(agent: Agent, env: Any = None, max_steps: int = 100) -> Rollout:
    spec = RunSpec("e", 0, 0, max_steps=max_steps, episode_timeout_s=None)
    (rollout,) = await SingleAgentSyncProtocol(agent).run(env or Countdown(30), spec)
    return rollout


def compactions(rollout: Rollout) -> list[EnvironmentStep]:
    return [step for step in rollout.env_steps if step.info.get("compacted")]


def calls_of(rollout: Rollout, step: EnvironmentStep) -> list[AgentStep]:
    return [rollout.steps[place] for place in step.agent_steps]  # type: ignore[misc]


def prompt(step: AgentStep) -> tuple[int, ...]:
    assert step.trace is not None
    return step.trace.prompt_token_ids


def longest(rollout: Rollout) -> int:
    return max(len(s.trace.token_ids) for s in rollout.agent_steps if s.trace)


async def test_a_compaction_is_a_turn_that_is_no_step() -> None:
    rollout = await play(scripted_agent(summing(), ctx=compacting()))
    assert rollout.error is None
    assert len(compactions(rollout)) >= 3
    assert sum(step.stepped for step in rollout.env_steps) == 30
    for step in compactions(rollout):
        assert (step.stepped, step.reward, step.action, step.truncated) == (False, 0.0, None, False)
        assert step.info["left_out"] == [0]
        (call,) = calls_of(rollout, step)
        assert call.turn_index == step.turn_index
        assert call.message["content"] == "It went on."
        assert call.fork is None, "the summary is sampled from the dialogue itself"
    assert [turn.index for turn in rollout.turns()] == list(range(30 + len(compactions(rollout))))
    assert longest(rollout) <= 400


async def test_the_prompt_after_it_has_the_ids_that_were_sampled() -> None:
    """A summary that a tokenizer would spell otherwise: those of the tiny one are single bytes."""
    rollout = await play(scripted_agent(summing("  sum \n"), ctx=compacting(keep_turns=2)))
    codec, steps = tiny_template().codec, rollout.steps
    for step in compactions(rollout):
        (summary,) = calls_of(rollout, step)
        after = steps[steps.index(step) + 1]
        assert isinstance(after, AgentStep)
        assert after.fork is not None
        assert after.fork.reason is ForkReason.COMPACTED
        assert summary.trace is not None
        begin = tiny_template().render(
            [{"role": "system", "content": "Count down."}, *summary.new_messages]
        )
        start = len(begin)
        ids = summary.trace.completion_token_ids
        assert prompt(after)[:start] == tuple(begin)
        assert prompt(after)[start : start + len(ids)] == ids
        text = codec.decode(prompt(after))
        assert text.count(move("go")) == step.info["kept_turns"] <= 2
        assert [m["content"] for m in after.new_messages] == [step.obs]
    assert any(step.info["kept_turns"] for step in compactions(rollout))


async def test_a_summary_that_is_cut_or_empty_is_asked_for_once_more() -> None:
    def policy(call: ScriptedCall) -> str:
        if "Write it again" in said_last(call):
            return "Short."
        return "long " * 20 if ASKED in said_last(call) else move("go")

    rollout = await play(scripted_agent(policy, ctx=compacting()))
    for step in compactions(rollout):
        first, second = calls_of(rollout, step)
        assert first.finish_reason == "length"
        assert second.message["content"] == "Short."
        assert "dropped_turns" not in step.info
    again = rollout.steps[rollout.steps.index(compactions(rollout)[0]) + 1]
    assert isinstance(again, AgentStep)
    text = tiny_template().codec.decode(prompt(again))
    assert "Short." in text
    assert "long" not in text


@pytest.mark.parametrize("summary", ["", "long " * 20, "<think>only this</think>"])
async def test_without_a_summary_the_oldest_turns_are_dropped_and_the_model_is_told(
    summary: str,
) -> None:
    def policy(call: ScriptedCall) -> str:
        last = said_last(call)
        return summary if ASKED in last or "Write it again" in last else move("go")

    rollout = await play(scripted_agent(policy, ctx=compacting()))
    assert rollout.error is None
    assert longest(rollout) <= 400
    for step in compactions(rollout):
        assert len(step.agent_steps) == 2
        dropped = step.info["dropped_turns"]
        assert dropped >= 1
        after = rollout.steps[rollout.steps.index(step) + 1]
        assert isinstance(after, AgentStep)
        text = tiny_template().codec.decode(prompt(after))
        assert f"[{dropped} turns were dropped here]" in text
        assert after.fork is not None
        assert after.fork.reason is ForkReason.COMPACTED


async def test_an_earlier_summary_outlives_a_failed_one() -> None:
    asked = 0

    def policy(call: ScriptedCall) -> str:
        nonlocal asked
        if ASKED not in said_last(call) and "Write it again" not in said_last(call):
            return move("go")
        asked += 1
        return "The first." if asked == 1 else ""

    rollout = await play(scripted_agent(policy, ctx=compacting()))
    last = rollout.agent_steps[-1]
    assert "The first." in tiny_template().codec.decode(prompt(last))


async def test_a_summary_is_compacted_again() -> None:
    def policy(call: ScriptedCall) -> str:
        if ASKED not in said_last(call):
            return move("go")
        numbers = re.findall(r"sum (\d+)", call.text)
        return f"sum {int(numbers[-1]) + 1 if numbers else 1}"

    rollout = await play(scripted_agent(policy, ctx=compacting()))
    said = [calls_of(rollout, step)[0].message["content"] for step in compactions(rollout)]
    assert said == [f"sum {n + 1}" for n in range(len(said))]
    assert len(said) >= 3


async def test_a_window_too_small_for_the_system_prompt_is_refused() -> None:
    agent = scripted_agent(summing(), ctx=compacting(400), system_prompt="Be good. " * 40)
    with pytest.raises(ConfigError, match=r"window of 400 tokens is too small.*enlarge"):
        await play(agent)
    with pytest.raises(ConfigError, match="needs a window"):
        await play(scripted_agent(summing(), ctx=CompactingDialog()))


@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"share": 0.0}, {"summary_tokens": 0}, {"keep_turns": -1}, {"request": " "}],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="CompactingDialog"):
        make_context({"kind": "compacting", **options})


async def test_an_observation_that_never_fits_ends_the_episode() -> None:
    class Flood(Countdown):
        def env_step(self, action: str) -> StepOutcome:
            return StepOutcome("x" * 1000, 0.0)

    rollout = await play(scripted_agent(summing(), ctx=compacting()), Flood())
    assert rollout.error is None
    assert rollout.truncation_reason == "context_window"
    assert longest(rollout) <= 400


async def test_an_answer_of_any_length_stays_within_the_window_of_the_context() -> None:
    agent = scripted_agent(lambda _: "on and " * 200, ctx=compacting())
    assert agent.inference.sampling.max_tokens is None
    rollout = await play(agent, max_steps=3)
    assert rollout.error is None
    assert longest(rollout) == 400


async def test_tools_that_fill_the_window_end_the_turn_and_not_the_episode() -> None:
    def dig() -> str:
        """Digs."""
        return "earth " * 60

    def policy(call: ScriptedCall) -> str:
        if ASKED in said_last(call):
            return "I dug."
        return tool_call("dig") if "2 left" not in call.tail(120) else move("go")

    agent = scripted_agent(
        policy, ToolAgent, tools=[dig], max_rounds=8, ctx=compacting(1600, share=0.6)
    )
    rollout = await play(agent, Countdown(3), max_steps=6)
    assert rollout.error is None
    assert compactions(rollout)
    assert any("filled the window" in step.next_obs for step in rollout.env_steps)
    assert longest(rollout) <= 1600


async def test_a_failure_in_the_middle_of_a_compaction_keeps_what_was_sampled() -> None:
    def fault(call: ScriptedCall) -> BaseException | None:
        return RuntimeError("gone") if "Write it again" in said_last(call) else None

    agent = scripted_agent(summing(""), ctx=compacting(), client={"fault": fault})
    rollout = await play(agent)
    assert rollout.error is not None
    last = rollout.env_steps[-1]
    assert last.info.keys() == {"compacted", "left_out"}
    assert len(last.info["left_out"]) == 2
    assert len(last.agent_steps) == 1


async def test_2000_steps_in_a_window_of_4000_tokens() -> None:
    def policy(call: ScriptedCall) -> str:
        last = said_last(call)
        if "7351" in last and "Step 0" in last:
            return tool_call("note", text="the code is 7351") if call.index == 0 else move("go")
        if ASKED in last:
            return f"I am still at it, after {call.index} calls."
        if "What is the code?" in last:
            (code,) = re.findall(r"1\. the code is (\d+)", call.text)
            return move(code)
        return move("go")

    agent = scripted_agent(
        policy,
        HarnessAgent,
        ctx=compacting(4000),
        sampling=SamplingConfig(max_tokens=100),
        remind_after=0,
    )
    rollout = await play(agent, Vault(2000), max_steps=2000)
    assert rollout.error is None
    assert rollout.env_steps[-1].reward_components["env"] == 1.0
    assert sum(step.stepped for step in rollout.env_steps) == 2000
    assert len(compactions(rollout)) > 20
    assert longest(rollout) <= 4000
    credit = drawn_credit([rollout], 0)
    items = build_items([rollout], credit)
    # Whole contexts would be too much to compare: each sampled token, with its place and weight.
    assert sum(int(item.action_mask.sum()) for item in items) == rollout.num_tokens
    assert len(items) == len(compactions(rollout)) + 1
    trained = sorted((span.turn_index, span.end - span.start) for i in items for span in i.turns)
    sampled: dict[int, int] = {}
    for step in rollout.agent_steps:
        assert step.trace is not None
        count = len(step.trace.completion_token_ids)
        sampled[step.turn_index] = sampled.get(step.turn_index, 0) + count
    assert trained == sorted(sampled.items())


TEMPLATES = {
    "tiny": tiny_template(),
    "tools": template_of(tiny_template().tokenizer, TOOL_TEMPLATE),
    "forking": template_of(tiny_template().tokenizer, FORKING_TEMPLATE),
}


def look(place: str) -> str:
    """Looks somewhere."""
    return f"Nothing is at {place}."


@given(st.data())
@settings(max_examples=25)
async def test_merging_changes_nothing_across_compactions_and_forks(data: st.DataObject) -> None:
    window = data.draw(st.integers(900, 1500), "window")
    ctx = compacting(
        window,
        share=data.draw(st.sampled_from([0.5, 0.75, 1.0]), "share"),
        keep_turns=data.draw(st.integers(0, 3), "keep_turns"),
    )
    seen: set[tuple[int, ...]] = set()

    def policy(call: ScriptedCall) -> str:
        assert len(call.request.prompt_token_ids) < window
        seen.add(call.request.prompt_token_ids)
        kinds = ("summary", "summary", "", "long") if ASKED in said_last(call) else ("move", "look")
        kind = data.draw(st.sampled_from(kinds))
        if kind == "look":
            return tool_call("look", place=data.draw(st.sampled_from(["home", "sea"])))
        return {"move": move("go"), "long": "long " * 20}.get(kind, kind)

    agent = scripted_agent(
        policy,
        ToolAgent,
        template=TEMPLATES[data.draw(st.sampled_from(sorted(TEMPLATES)), "template")],
        tools=[look],
        ctx=ctx,
        sampling=SamplingConfig(max_tokens=100),
    )
    rollout = await play(agent, Countdown(12), max_steps=20)
    assert rollout.error is None
    assert longest(rollout) <= window
    credit = drawn_credit([rollout], 0)
    facts = facts_of_rollouts([rollout], credit)
    for merge in (True, False):
        assert facts_of_items(build_items([rollout], credit, merge=merge)) == facts
    assert max(facts.values()) == 1 or len(seen) < len(rollout.agent_steps)
    assert rollout_from_row(rollout_row(rollout)) == rollout


def request(kind: str = "single_agent", **agent: Any) -> RolloutRequest:
    context = {"kind": "compacting", "summary_tokens": 40, "keep_turns": 1, "request": ASKED}
    options = {"parser": {"kind": "xml", "tag": "move"}, "context": context, **agent}
    return RolloutRequest(EnvSpec("countdown", {"steps": 30}), ProtocolSpec(kind, options))


@pytest.mark.parametrize("summary", ["It went on.", "", "long " * 20])
async def test_a_replay_is_exact_without_a_model(summary: str) -> None:
    """Neither the window nor the lengths of prompts are in the record: it says where it was
    compacted."""

    def policy(call: ScriptedCall) -> str:
        last = said_last(call)
        return summary if ASKED in last or "Write it again" in last else move("go")

    runtime = scripted_runtime(policy, max_context_tokens=400)
    registry = {"countdown": Countdown}
    (rollout,) = await RolloutEngine(registry, runtime=runtime).generate_rollouts(
        [request()], max_steps=50
    )
    assert rollout.error is None
    assert len(compactions(rollout)) >= 3
    for options in ({}, {"chat_template": tiny_template()}, {"runtime": runtime}):
        report = await replay(rollout, env_registry=registry, **options)
        assert report.divergence is None
        assert report.tokens == rollout.num_tokens
        assert report.rollouts[0].steps[-1] == rollout.steps[-1]


async def test_a_summary_gets_the_return_of_what_came_after_it_undiscounted() -> None:
    rollout = await play(scripted_agent(summing(), ctx=compacting()))
    credit = MonteCarloReturn(gamma=0.9).compute([rollout])
    for step in compactions(rollout):
        assert credit["e/agent", step.turn_index] == credit["e/agent", step.turn_index + 1]
    moves = [turn for turn in rollout.turns() if not turn.compacted]
    for turn, after in pairwise(moves):
        value = turn.reward + 0.9 * credit["e/agent", after.index]
        assert credit["e/agent", turn.index] == pytest.approx(value)


def test_the_bound_by_which_rendering_is_saved_is_generous() -> None:
    plain = tiny_template().render([{"role": "user", "content": "x"}])
    assert len(plain) - 1 < _ADDED
