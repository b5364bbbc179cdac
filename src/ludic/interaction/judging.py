"""Reward functions beside an environment's own rewards: a judge, say, for any environment.

They are asked once for each agent, when its episode is over: the last action is the answer, and
what came before it the question. What they return is added to the last step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ludic.interaction.collector import AgentTrack
from ludic.registry import REWARDS
from ludic.rewards import Attempt, RewardFn, RewardSpec, RewardSum, Score, make_rewards
from ludic.types import EnvironmentStep
from ludic.workers.threads import shared_threads

Rewards: TypeAlias = RewardSpec | Sequence[RewardSpec] | RewardSum


def rewards_of(specs: Rewards | None) -> RewardSum | None:
    """Reward functions by name or table, as everywhere; one by its place is the function itself."""
    if specs is None or isinstance(specs, RewardSum):
        return specs
    one = isinstance(specs, str | Mapping) or callable(specs)
    several: Sequence[RewardSpec] = [specs] if one else specs  # type: ignore[list-item,assignment]
    return make_rewards([_by_place(spec) for spec in several])


def _by_place(spec: RewardSpec) -> RewardSpec:
    if isinstance(spec, str) and spec not in REWARDS.names():
        found: RewardFn = REWARDS.get(spec)
        return found
    return spec


async def judge(
    rewards: RewardSum | None, tracks: Iterable[AgentTrack], timeout_s: float | None
) -> None:
    """Adds what `rewards` give for each track that acted. An agent that never came to an action
    has nothing to be judged."""
    if rewards is None:
        return
    for track in tracks:
        if track.collected and (attempt := attempt_of(track)) is not None:
            for name, reward in (await score(rewards, attempt, timeout_s)).components.items():
                track.add_bonus(name, reward)


def attempt_of(track: AgentTrack) -> Attempt | None:
    """What an agent's rewards are given: its last action, everything before it, and as `target`
    and `row` what the environment told of the step."""
    steps = [s for s in track.steps if isinstance(s, EnvironmentStep) and s.action is not None]
    if not steps:
        return None
    *before, last = steps
    told = [part for step in before for part in (step.obs, f"> {step.action}")]
    return Attempt(
        answer=last.action or "",
        target=str(last.info.get("target", "")),
        question="\n\n".join(filter(None, [*told, last.obs])),
        row=last.info,
    )


async def score(rewards: RewardSum, attempt: Attempt, timeout_s: float | None) -> Score:
    """In a thread, since the functions may block; what they leave to await is awaited here."""
    found: Any = await shared_threads().run(
        lambda: rewards(attempt),
        what="a reward",
        whom="the reward function",
        timeout_s=timeout_s,
    )
    result: Score = await found if inspect.isawaitable(found) else found
    return result
