"""Merging, packing, sharing, order and micro-batch size change neither an algorithm's loss nor
gradient.

Rollouts of several turns go through the real building, packing and policy; every preset must give
the same numbers for one row per turn and for merged rows, in one micro-batch and in many, with the
tokens that rows begin with computed for each or once.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from ludic.inference.tiny import tiny_model
from ludic.saw import batch_from_rollouts, build_items, make_batch
from ludic.saw.items import SAWBatch
from ludic.training import (
    CorrectedLoss,
    GroupNormalizedReturn,
    MaskedImportance,
    RLAlgorithm,
    TokenClippedSurrogateLoss,
    TruncatedImportance,
    make_algorithm,
)
from ludic.training.update.packing import lay_out, pack
from ludic.training.update.planning import plan_micro_batches
from ludic.training.update.policy import Policy
from ludic.types import AgentStep, Rollout, Step
from tests.oracles.rollouts import make_rollout

GROUP = 4


@cache
def policy() -> Policy:
    # float64, so that another order of summation does not show.
    return Policy(tiny_model(hidden_size=16, layers=1, heads=2, kv_heads=1).double())


def scored(batch: SAWBatch) -> list[np.ndarray[Any, Any]]:
    layout, found = lay_out(batch), []
    with torch.no_grad():
        for index in range(len(batch.items)):
            found.append(policy().score(pack(layout, (index,))).logprobs.numpy())
    return found


@cache
def rollouts() -> tuple[Rollout, ...]:
    """Two groups; the sampler's log-probs are a little off the policy's, as stale ones are."""
    rng = random.Random(1)
    made = [
        make_rollout(
            f"{group}{i}",
            [rng.uniform(0, 0.3) for _ in range(rng.randint(1, 3))],
            group=group,
            task=group,
        )
        for group in "ab"
        for i in range(GROUP)
    ]
    result = []
    for rollout in made:
        credit = {(rollout.id, turn): 1.0 for turn in range(3)}
        scores = iter(scored(make_batch(build_items([rollout], credit, merge=False))))
        steps: list[Step] = []
        for step in rollout.steps:
            if isinstance(step, AgentStep) and step.trace is not None:
                logprobs = tuple(float(x) + rng.uniform(-0.5, 0.5) for x in next(scores))
                trace = replace(step.trace, completion_logprobs=logprobs)
                steps.append(replace(step, trace=trace))
            else:
                steps.append(step)
        result.append(replace(rollout, steps=tuple(steps)))
    return tuple(result)


def algorithm(name: str) -> RLAlgorithm:
    if name == "corrected":
        loss = CorrectedLoss(
            TokenClippedSurrogateLoss(),
            TruncatedImportance(1.2),
            MaskedImportance(0.8, 1.3, level="rollout", mean="geometric", keep_ratio=False),
        )
        return RLAlgorithm(name, GroupNormalizedReturn(GROUP), loss)
    grouped = ("grpo", "dr_grpo", "gspo", "cispo", "sapo", "gmpo", "scalerl")
    settings: dict[str, Any] = {"group_size": GROUP} if name in grouped else {}
    if name == "gspo":
        settings["clip"] = (0.9, 1.1)
    if name == "dr_grpo":
        settings["max_completion_tokens"] = 8
    return make_algorithm(name, **settings)


def loss_and_gradient(
    name: str,
    *,
    merge: bool,
    budget: int = 10_000,
    shuffled: bool = False,
    share: bool = False,
) -> tuple[float, Tensor]:
    chosen, found = algorithm(name), list(rollouts())
    if shuffled:
        random.Random(3).shuffle(found)
    batch = batch_from_rollouts(found, chosen.credit_assigner, merge=merge)
    items = []
    for item in batch.items:
        behavior = item.attachments.behavior_logprobs
        assert behavior is not None
        attached = replace(item.attachments, teacher_logprobs=behavior - np.float32(0.25))
        items.append(replace(item, attachments=attached))
    batch = chosen.prepare(make_batch(items, batch.meta))
    layout = lay_out(batch)
    (plan,) = plan_micro_batches(
        layout, micro_token_budget=budget, scope=chosen.loss.scope, shares=share
    )
    policy().zero_grad()
    total = 0.0
    for members in filter(None, plan):
        micro = pack(layout, members, share=share)
        loss, _ = chosen.loss.compute(policy().score(micro), micro.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    gradients = [p.grad for p in policy().parameters() if p.grad is not None]
    return total, torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize(
    "name",
    [
        "reinforce",
        "reinforce_baseline",
        "grpo",
        "dr_grpo",
        "gspo",
        "cispo",
        "sapo",
        "gmpo",
        "scalerl",
        "spo",
        "opd",
        "sft",
        "corrected",
    ],
)
def test_no_rearrangement_changes_the_loss_or_the_gradient(name: str) -> None:
    value, gradient = loss_and_gradient(name, merge=False)
    assert gradient.abs().max() > 1e-4
    arrangements: tuple[dict[str, Any], ...] = (
        {"merge": True},
        {"merge": True, "budget": 40},
        {"merge": False, "budget": 40},
        {"merge": True, "budget": 60, "shuffled": True},
        {"merge": True, "share": True},
        {"merge": False, "share": True},
        {"merge": False, "budget": 40, "share": True},
    )
    for arrangement in arrangements:
        other, slopes = loss_and_gradient(name, **arrangement)
        assert other == pytest.approx(value, rel=1e-6, abs=1e-9), arrangement
        scale = float(gradient.abs().max())
        torch.testing.assert_close(slopes, gradient, rtol=0, atol=1e-6 * scale)
