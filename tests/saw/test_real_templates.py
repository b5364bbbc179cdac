"""Merging through the real thing: protocols, agents, contexts, tools and templates of models."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

import pytest

from ludic.envs import SingleAgentEnv
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.scripted_client import ScriptedCall, ScriptedChatClient
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.templates.tool_parsers import HermesToolParser
from ludic.interaction.base import Runtime
from ludic.registry import register_tool, unregister_tool
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.saw import build_items, make_batch
from ludic.types import Action, Info, Obs, Rollout, StepOutcome
from tests.inference.template_kinds import KINDS, tokenizer_of
from tests.saw.drawing import drawn_credit, facts_of_items, facts_of_rollouts


class TalkEnv(SingleAgentEnv):
    """Answers every action with a sentence of varying length, some of it awkward to tokenise."""

    blocking: ClassVar[bool] = False

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self._random = Random(seed)
        self._turns = 0
        return self._sentence(), {}

    def env_step(self, action: Action) -> StepOutcome:
        self._turns += 1
        return StepOutcome(self._sentence(), self._random.random(), terminated=self._turns == 5)

    def env_current_obs(self) -> Obs:
        return ""

    def _sentence(self) -> str:
        words = (" the", "cat ", "\n", "  ", "é", "<|im_end|>", "</think>", "7", "{}", "\t")
        return "".join(self._random.choices(words, k=self._random.randrange(1, 9))) + "?"


def thinks(call: ScriptedCall) -> str:
    """Thinks first, mostly; sometimes white space stands where a template would trim it."""
    draw = Random(call.request.sampling.seed)
    answer = f"{' ' * draw.randrange(2)}move {draw.randrange(100)}{chr(10) * draw.randrange(2)}"
    if draw.random() < 0.7:
        return f"<think>\nlet me see {draw.randrange(100)}\n</think>\n\n{answer}"
    return answer


def calls_tools(call: ScriptedCall) -> str:
    draw = Random(call.request.sampling.seed)
    if draw.random() < 0.5:
        style = draw.choice(('{"name": "count", "arguments": {"word": "a"}}', '{"name": broken'))
        return f"I count.\n<tool_call>\n{style}\n</tool_call>"
    return f"answer {draw.randrange(9)}"


async def play(
    template: HFChatTemplate, policy: Any, protocol: ProtocolSpec, **sampling: Any
) -> list[Rollout]:
    runtime = Runtime(
        ScriptedChatClient(policy, template, logprob=lambda i, token: -0.01 * i - 1e-4 * token),
        template,
        "m",
        InferenceSpec(SamplingConfig(**sampling)),
    )
    engine = RolloutEngine({"talk": TalkEnv}, runtime=runtime)
    asked = RolloutRequest(EnvSpec("talk"), protocol, num_episodes=6)
    return await engine.generate_rollouts([asked], max_steps=8)


def check(rollouts: Sequence[Rollout]) -> tuple[int, int]:
    """Holds the laws of merging; answers the number of rows with and without it."""
    assert all(r.error is None for r in rollouts)
    credit = drawn_credit(rollouts, seed=0)
    merged, unmerged = (build_items(rollouts, credit, merge=m) for m in (True, False))
    expected = facts_of_rollouts(rollouts, credit)
    assert facts_of_items(merged) == facts_of_items(unmerged) == expected
    assert make_batch(merged).counts == make_batch(unmerged).counts
    return len(merged), len(unmerged)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", ["full_dialog", "truncated_thinking"])
async def test_merging_changes_nothing_with_real_templates(kind: str, context: str) -> None:
    template = HFChatTemplate(tokenizer_of(kind))
    protocol = ProtocolSpec("single_agent", {"parser": "text", "context": context})
    rollouts = await play(template, thinks, protocol)
    merged, unmerged = check(rollouts)
    forks = sum(s.fork is not None for r in rollouts for s in r.agent_steps)
    turns = sum(len(r.agent_steps) for r in rollouts)
    if context == "truncated_thinking" or kind == "qwen3_thinking":
        assert forks > 0  # history is rewritten: there is something to fork
    else:
        assert (forks, merged) == (0, len(rollouts))
    assert merged <= unmerged == turns


@pytest.mark.parametrize("kind", KINDS)
async def test_completions_cut_by_length_are_merged_with_their_closing_masked(kind: str) -> None:
    template = HFChatTemplate(tokenizer_of(kind))
    protocol = ProtocolSpec("single_agent", {"parser": "text"})
    rollouts = await play(template, lambda call: "one two three four five", protocol, max_tokens=3)
    assert all(s.finish_reason == "length" for r in rollouts for s in r.agent_steps)
    check(rollouts)


@pytest.mark.parametrize("kind", ["qwen25_tools", "qwen3_thinking"])
@pytest.mark.parametrize("context", ["full_dialog", "truncated_thinking"])
async def test_merging_changes_nothing_with_tools(kind: str, context: str) -> None:
    def count(word: str) -> int:
        """Counts letters."""
        return len(word)

    template = HFChatTemplate(tokenizer_of(kind), tool_parser=HermesToolParser())
    kwargs = {"agent": "tool", "tools": ["count"], "parser": "text", "context": context}
    register_tool("count", count)
    try:
        rollouts = await play(template, calls_tools, ProtocolSpec("single_agent", kwargs))
    finally:
        unregister_tool("count")
    assert any(s.tool_messages for r in rollouts for s in r.agent_steps)
    merged, unmerged = check(rollouts)
    assert merged <= unmerged
