"""The gradient of a compaction's summary against a slow float64 reference, for each choice of
credit: every call scored alone, with weights computed by hand."""

from __future__ import annotations

import asyncio
import math
from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from ludic.inference.scripted_client import ScriptedCall
from ludic.inference.tiny import tiny_model
from ludic.interaction import RunSpec, SingleAgentSyncProtocol
from ludic.saw import batch_from_rollouts
from ludic.saw.building import CreditAssigner
from ludic.saw.filters import SampleFilter, drop_if
from ludic.training import GroupNormalizedReturn, HybridNormalizedReturn, MonteCarloReturn
from ludic.training.algorithms.reinforce import make_reinforce
from ludic.training.update.packing import lay_out, pack
from ludic.training.update.planning import plan_micro_batches
from ludic.training.update.policy import Policy
from ludic.types import AgentStep, EnvironmentStep, Rollout
from tests.agents.scripted import move, scripted_agent
from tests.agents.test_compaction import ASKED, compacting, said_last
from tests.interaction.worlds import Countdown

CHOICES: dict[str, CreditAssigner] = {
    "group, advantage": GroupNormalizedReturn(2, normalize_adv=True),
    "group, none": GroupNormalizedReturn(2, normalize_adv=True, summaries="none"),
    "hybrid, advantage": HybridNormalizedReturn(2),
    "hybrid, none": HybridNormalizedReturn(2, summaries="none"),
    "monte carlo": MonteCarloReturn(0.9),
}


@cache
def network() -> Any:
    return tiny_model(hidden_size=16, layers=1, heads=2, kv_heads=1).double()


@cache
def model() -> Policy:
    return Policy(network())


def played(number: int) -> Rollout:
    """A long episode with several summaries; what is said differs between the episodes."""

    def policy(call: ScriptedCall) -> str:
        return f"Sum {number}." if ASKED in said_last(call) else move("go" * (number + 1))

    agent = scripted_agent(
        policy,
        ctx=compacting(300, summary_tokens=20),
        client={"logprob": lambda place, token: -2.0 - 0.01 * (token % 7)},
    )
    spec = RunSpec(f"e{number}", number, number, max_steps=30)
    (rollout,) = asyncio.run(SingleAgentSyncProtocol(agent).run(Countdown(14 + number), spec))
    assert rollout.error is None
    assert sum(bool(step.info.get("compacted")) for step in rollout.env_steps) >= 2
    return replace(rollout, group_id="g")


@cache
def rollouts() -> tuple[Rollout, ...]:
    return played(0), played(1)


def weights_by_hand(name: str) -> dict[tuple[str, int], float]:
    """The weight of every turn that is trained on, by plain loops over the steps."""
    weights: dict[tuple[str, int], float] = {}
    returns = [sum(s.reward for s in r.steps if isinstance(s, EnvironmentStep)) for r in rollouts()]
    mean = sum(returns) / 2
    std = math.sqrt(sum((r - mean) ** 2 for r in returns))
    for rollout, total in zip(rollouts(), returns, strict=True):
        steps = [s for s in rollout.steps if isinstance(s, EnvironmentStep)]
        for place, step in enumerate(steps):
            is_summary = step.info.get("compacted", False)
            if name == "monte carlo":
                value, discount = 0.0, 1.0
                for later in steps[place:]:
                    value += discount * later.reward
                    discount *= 1.0 if later.info.get("compacted") else 0.9
                weights[rollout.id, step.turn_index] = value
            elif not (is_summary and name.endswith("none")):
                weights[rollout.id, step.turn_index] = (total - mean) / (std + 1e-4)
    return weights


def reference(name: str, summaries_only: bool) -> Tensor:
    """Σ sg(ρ)·A·∇logp over the tokens, divided by their number; one call at a time."""
    weights = weights_by_hand(name)
    policy = model()
    policy.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for rollout in rollouts():
        compacted = {s.turn_index for s in rollout.env_steps if s.info.get("compacted")}
        for step in rollout.agent_steps:
            weight = weights.get((rollout.id, step.turn_index))
            if weight is None or (summaries_only and step.turn_index not in compacted):
                continue
            total = total + weight * _scored(step)
            count += len(step.trace.completion_token_ids) if step.trace else 0
    if count:
        (-total / count).backward()  # type: ignore[no-untyped-call]
    return _gradient()


def _scored(step: AgentStep) -> Tensor:
    trace = step.trace
    assert trace is not None
    assert trace.completion_logprobs is not None
    ids = torch.tensor([trace.token_ids])
    logits = network()(input_ids=ids).logits[0].double()
    start = len(trace.prompt_token_ids)
    logprobs = logits[start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]
    ratio = (logprobs - torch.tensor(trace.completion_logprobs, dtype=torch.float64)).exp().detach()
    total: Tensor = (ratio * logprobs).sum()
    return total


def _gradient() -> Tensor:
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
            for p in model().parameters()
        ]
    )


def trained(name: str, *, merge: bool, only: SampleFilter | None) -> Tensor:
    batch = batch_from_rollouts(rollouts(), CHOICES[name], merge=merge, sample_filter=only)
    model().zero_grad()
    if batch.items:
        loss = make_reinforce().loss
        layout = lay_out(batch)
        (plan,) = plan_micro_batches(layout, micro_token_budget=2000, scope=loss.scope)
        for members in filter(None, plan):
            micro = pack(layout, members)
            value, _ = loss.compute(model().score(micro), micro.loss)
            value.backward()  # type: ignore[no-untyped-call]
    return _gradient()


@pytest.mark.parametrize("summaries_only", [False, True], ids=["all", "summaries"])
@pytest.mark.parametrize("name", CHOICES)
def test_the_gradient_is_that_of_the_reference(name: str, summaries_only: bool) -> None:
    only = drop_if("move", lambda s: not s.turn.compacted) if summaries_only else None
    expected = reference(name, summaries_only)
    assert bool(expected.any()) != (summaries_only and name.endswith("none"))
    scale = max(float(expected.abs().max()), 1e-12)
    for merge in (True, False):
        found = trained(name, merge=merge, only=only)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * scale)
