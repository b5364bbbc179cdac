from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from ludic.agents import Agent
from ludic.context import FullDialog, TruncatedThinkingContext, WindowedDialog
from ludic.errors import AgentError, DeadlineError, InferenceError
from ludic.inference import (
    InferenceSpec,
    SamplingConfig,
    TokenCompletionRequest,
    VLLMExtensions,
)
from ludic.inference.scripted_client import ScriptedChatClient
from ludic.parsers import ParseResult, text_parser
from ludic.seeding import derive_seed
from ludic.types import (
    AgentStep,
    ChatResponse,
    FinishReason,
    ForkReason,
    Message,
    TruncationReason,
    from_json,
    to_json,
)
from tests.agents.scripted import move, roles, scripted_agent, tiny_template


async def turns(agent: Agent, n: int, *, seed: int | None = None) -> list[AgentStep]:
    agent.reset("Play.", seed=seed, conversation_id="c")
    agent.on_env_reset("Begin.", {})
    steps: list[AgentStep] = []
    for i in range(n):
        act = await agent.act()
        steps += act.steps
        agent.on_after_step(f"Observation {i}.", {})
    return steps


async def test_a_turn_is_one_model_call_and_what_it_was_read_as() -> None:
    agent = scripted_agent([move("a")])
    agent.reset("Play.", seed=3, conversation_id="c")
    agent.on_env_reset("Begin.", {})
    act = await agent.act()
    assert act.parse == ParseResult("a", 0.25)
    assert act.truncation is None
    (step,) = act.steps
    assert step.message == {"role": "assistant", "content": "<move>a</move>"}
    assert step.new_messages == (
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Begin."},
    )
    assert (step.turn_index, step.finish_reason, step.fork) == (0, FinishReason.STOP, None)
    assert step.trace is not None
    assert list(step.trace.prompt_token_ids) == tiny_template().render(step.new_messages)


async def test_prompts_extend_each_other_token_by_token_while_the_context_only_grows() -> None:
    steps = await turns(scripted_agent([move("a"), move("b"), move("c")]), 3)
    for before, after in itertools.pairwise(steps):
        assert before.trace
        assert after.trace
        assert after.trace.extends(before.trace)
        assert after.fork is None
        assert roles(after) == ["user"]
    assert [s.turn_index for s in steps] == [0, 1, 2]


async def test_the_dialogue_can_be_read_back_from_the_new_messages() -> None:
    agent = scripted_agent([move("a"), move("b")])
    steps = await turns(agent, 2)
    read_back = [m for s in steps for m in (*s.new_messages, s.message)]
    assert isinstance(agent.ctx, FullDialog)
    assert read_back == list(agent.ctx.history[:-1])


@pytest.mark.parametrize("ctx", [TruncatedThinkingContext(), WindowedDialog(max_turns=1)])
async def test_a_rewritten_history_forks_and_says_so(ctx: Any) -> None:
    script = [f"<think>Hm {i}.</think>{move('a')}" for i in range(3)]
    steps = await turns(scripted_agent(script, ctx=ctx), 3)
    assert steps[0].fork is None
    forks = [s.fork.reason for s in steps if s.fork is not None]
    assert ForkReason.HISTORY_REWRITTEN in forks
    forked = next(s for s in steps if s.fork is not None)
    before = steps[steps.index(forked) - 1]
    assert forked.trace
    assert before.trace
    assert not forked.trace.extends(before.trace)
    assert roles(forked) == ["user"]


class Eliding(FullDialog):
    """Shortens earlier observations in place."""

    def on_before_act(self) -> Sequence[Message]:
        messages = super().on_before_act()
        for message in [m for m in messages if m["role"] == "user"][:-1]:
            message["content"] = "[elided]"
        return messages


async def test_a_history_changed_in_place_is_shown_at_once_and_records_stay_as_they_were() -> None:
    steps = await turns(scripted_agent([move("a"), move("b")], ctx=Eliding()), 2)
    shown = [
        tiny_template().codec.decode(s.trace.prompt_token_ids) if s.trace else "" for s in steps
    ]
    assert ["Begin." in shown[0], "Begin." in shown[1]] == [True, False]
    assert steps[0].new_messages[-1]["content"] == "Begin."
    assert steps[1].fork is not None
    assert steps[1].fork.reason is ForkReason.HISTORY_REWRITTEN


async def test_every_model_call_has_a_seed_of_its_own() -> None:
    steps = await turns(scripted_agent([move("a")] * 3), 3, seed=11)
    assert [s.sampling["seed"] for s in steps] == [derive_seed(11, "call", n) for n in range(3)]
    steps = await turns(scripted_agent([move("a")]), 1, seed=None)
    assert steps[0].sampling["seed"] is None


async def test_the_sampling_settings_of_each_call_are_kept_as_json() -> None:
    sampling = SamplingConfig(temperature=0.7, stop=("###",), max_tokens=90)
    (step,) = await turns(scripted_agent([move("a")], sampling=sampling), 1, seed=1)
    assert step.sampling["temperature"] == 0.7
    assert step.sampling["stop"] == ["###"]
    assert "extensions" not in step.sampling
    assert from_json(AgentStep, to_json(step)) == step


async def test_what_a_server_was_asked_for_besides_is_kept_with_the_settings() -> None:
    agent = scripted_agent([move("a")])
    overrides = {"logit_bias": {5: -1.0}, "bad_words": ("no",)}  # as a server takes them, too
    extensions = VLLMExtensions(overrides, max_think_tokens=9)
    agent.inference = InferenceSpec(extensions=extensions)
    (step,) = await turns(agent, 1)
    assert step.sampling["extensions"] == {
        "extra_body_overrides": {"logit_bias": {"5": -1.0}, "bad_words": ["no"]},
        "max_think_tokens": 9,
    }
    assert from_json(AgentStep, to_json(step)) == step


async def test_an_answer_that_does_not_parse_has_the_parsers_reward_and_feedback() -> None:
    agent = scripted_agent(["I do not know."])
    agent.reset()
    agent.on_env_reset("Begin.", {})
    act = await agent.act()
    assert act.parse.action is None
    assert act.parse.reward == -0.5
    assert act.parse.obs is not None
    assert "<move>" in act.parse.obs


async def test_a_completion_cut_by_length_is_no_action_even_if_it_would_parse() -> None:
    # The action is complete, but the end token no longer fits.
    length = len(move("a"))
    agent = scripted_agent([move("a")], sampling=SamplingConfig(max_tokens=length))
    agent.reset()
    agent.on_env_reset("Begin.", {})
    act = await agent.act()
    assert act.steps[0].finish_reason is FinishReason.LENGTH
    assert act.steps[0].message["content"] == move("a")
    assert act.parse.action is None
    assert act.parse.reward == -0.5, "no bonus for a cut answer"
    assert act.parse.obs is not None
    assert "cut off" in act.parse.obs


async def test_a_cut_completion_keeps_the_parsers_penalty() -> None:
    agent = scripted_agent([move("a")], sampling=SamplingConfig(max_tokens=3))
    agent.reset()
    agent.on_env_reset("Begin.", {})
    assert (await agent.act()).parse.reward == -0.5


async def test_running_on_costs_as_much_as_not_answering() -> None:
    costs = []
    for text in (move("a") * 3, "nothing"):
        agent = scripted_agent([text], sampling=SamplingConfig(max_tokens=12))
        agent.reset()
        agent.on_env_reset("Begin.", {})
        costs.append((await agent.act()).parse.reward)
    assert costs[0] == costs[1] < 0


async def test_after_a_cut_completion_the_prompt_still_extends_the_sampled_tokens() -> None:
    agent = scripted_agent([move("abcdef"), move("a")], sampling=SamplingConfig(max_tokens=15))
    first, second = await turns(agent, 2)
    assert first.finish_reason is FinishReason.LENGTH
    assert first.trace
    assert second.trace
    assert second.trace.extends(first.trace)


async def test_a_prompt_that_no_longer_fits_is_an_ending_and_not_an_exception() -> None:
    agent = scripted_agent([move("a")] * 3, client={"max_context_tokens": 10})
    agent.reset("A system prompt that is longer than the context.")
    agent.on_env_reset("Begin.", {})
    act = await agent.act()
    assert act.truncation is TruncationReason.CONTEXT_WINDOW
    assert act.steps == ()
    assert act.parse.action is None


async def test_max_tokens_is_lowered_to_what_fits() -> None:
    prompt = len(tiny_template().render([{"role": "user", "content": "Begin."}]))
    agent = scripted_agent(
        [move("a")],
        sampling=SamplingConfig(max_tokens=1000),
        client={"max_context_tokens": prompt + 5},
    )
    agent.reset()
    agent.on_env_reset("Begin.", {})
    act = await agent.act()
    assert act.steps[0].sampling["max_tokens"] == 5
    assert act.steps[0].finish_reason is FinishReason.LENGTH
    assert agent.inference.sampling.max_tokens == 1000


def test_an_agent_without_a_template_says_what_to_pass() -> None:
    client = ScriptedChatClient(["a"], tiny_template())
    with pytest.raises(AgentError, match="needs a chat template"):
        Agent(client, "m", FullDialog(), text_parser(), None)  # type: ignore[arg-type]


async def test_resetting_begins_a_new_conversation_with_the_same_seeds() -> None:
    agent = scripted_agent([move("a"), move("b")], client={"cycle": True})
    first = await turns(agent, 2, seed=5)
    second = await turns(agent, 2, seed=5)
    assert first == second


class OddClient(ScriptedChatClient):
    """Answers wrongly in one way or another."""

    def __init__(self, fault: str) -> None:
        super().__init__([move("a")], tiny_template(), cycle=True)
        self.mischief = fault

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        if self.mischief == "hang":
            await asyncio.sleep(3600)
        response = await super().complete_tokens(request)
        assert response.trace is not None
        if self.mischief == "other_prompt":
            return replace(response, trace=replace(response.trace, prompt_token_ids=(1, 2)))
        if self.mischief == "abort":
            return replace(response, finish_reason=FinishReason.ABORT)
        if self.mischief == "text_only":
            return replace(response, trace=None)
        return response


def odd_agent(fault: str, **kwargs: Any) -> Agent:
    agent: Agent = scripted_agent([move("a")], **kwargs)
    agent.client = OddClient(fault)
    return agent


async def test_a_client_that_does_not_keep_the_deadline_is_left() -> None:
    agent = odd_agent("hang", request_timeout_s=0.01)
    with pytest.raises(DeadlineError, match="a completion from model 'scripted'"):
        await turns(agent, 1)


async def test_an_answer_to_another_prompt_is_refused() -> None:
    with pytest.raises(InferenceError, match="different prompt"):
        await turns(odd_agent("other_prompt"), 1)


async def test_an_aborted_request_is_no_answer() -> None:
    with pytest.raises(InferenceError, match="aborted"):
        await turns(odd_agent("abort"), 1)


async def test_a_backend_that_returns_only_text_can_be_played_with() -> None:
    steps = await turns(odd_agent("text_only"), 2)
    assert [s.message["content"] for s in steps] == [move("a")] * 2
    assert all(s.trace is None and s.fork is None for s in steps)
