"""Credit: how much each turn of each rollout is worth. NumPy only, so an actor can run it.

A turn's own reward is that of its environment step plus those of the outcomes heard before the next
turn. A rollout's return R is the undiscounted sum of all its rewards. A rollout without a turn has
nothing to train on, but its return still counts in its group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ludic.errors import ConfigError, CreditError
from ludic.types import AgentStep, EnvironmentStep, Rollout, RolloutStepKey

Credit = Mapping[RolloutStepKey, float]


SummaryCredit: TypeAlias = Literal["advantage", "none"]
"""What a summary by which a dialogue was compacted gets of group-relative credit: its rollout's
advantage, or nothing, so that it is not trained on."""


def turn_rewards(rollout: Rollout) -> list[tuple[int, float]]:
    """(turn index, reward) of every turn with a model call, in order.

    What was heard outside of any turn counts to the turn before it, or to the first one.
    """
    turns: list[tuple[int, float]] = []
    early = 0.0
    for turn in rollout.turns():
        if turn.agent_steps:
            turns.append((turn.index, turn.reward + early))
            early = 0.0
        elif turns:
            turns[-1] = (turns[-1][0], turns[-1][1] + turn.reward)
        else:
            early += turn.reward
    _sum(rollout, [reward for _, reward in turns])
    return turns


def rollout_return(rollout: Rollout) -> float:
    """R: the undiscounted sum of the rollout's rewards, whether or not the agent ever acted."""
    return _sum(rollout, [s.reward for s in rollout.steps if isinstance(s, EnvironmentStep)])


_LARGEST_RETURN = 1e150
"""Means and deviations take sums of returns, and their squares."""


def _sum(rollout: Rollout, rewards: Sequence[float]) -> float:
    try:
        total = math.fsum(rewards)
    except OverflowError:
        total = math.inf
    if abs(total) > _LARGEST_RETURN:
        raise CreditError(
            f"rollout {rollout.id!r}: its {len(rewards)} rewards, up to "
            f"{max(map(abs, rewards)):g}, add up to more than can be computed with "
            f"({_LARGEST_RETURN:g}): scale the environment's rewards down"
        )
    return total


def compactions(rollout: Rollout) -> set[int]:
    """The turns that are no moves, but summaries by which the dialogue was compacted."""
    return {turn.index for turn in rollout.turns() if turn.compacted}


def spread(
    rollouts: Sequence[Rollout], weights: Sequence[float], summaries: SummaryCredit = "advantage"
) -> dict[RolloutStepKey, float]:
    """Gives all turns of each rollout that rollout's weight; summaries only if they are to have
    it."""
    credit: dict[RolloutStepKey, float] = {}
    for rollout, weight in zip(rollouts, weights, strict=True):
        acted = {step.turn_index for step in rollout.steps if isinstance(step, AgentStep)}
        if summaries == "none":
            acted -= compactions(rollout)
        for index in sorted(acted):
            credit[rollout.id, index] = float(weight)
    return credit


@dataclass(frozen=True, slots=True)
class MonteCarloReturn:
    """The discounted return from the turn on: Σ γ^k r. Steps inside a turn do not discount, and
    neither does a compaction: its summary gets the return of what came after it."""

    gamma: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"MonteCarloReturn.gamma={self.gamma!r}: must be in [0, 1]")

    def compute(self, rollouts: Sequence[Rollout]) -> Credit:
        credit: dict[RolloutStepKey, float] = {}
        for rollout in rollouts:
            value, summaries = 0.0, compactions(rollout)
            for index, reward in reversed(turn_rewards(rollout)):
                value = reward + (1.0 if index in summaries else self.gamma) * value
                credit[rollout.id, index] = value
        return credit


@dataclass(frozen=True, slots=True)
class PerStepReward:
    """Each turn's own reward, and nothing of what came after."""

    def compute(self, rollouts: Sequence[Rollout]) -> Credit:
        return {(r.id, index): reward for r in rollouts for index, reward in turn_rewards(r)}


@dataclass(frozen=True, slots=True)
class EpisodicReturn:
    """The whole rollout's return, for every turn of it."""

    def compute(self, rollouts: Sequence[Rollout]) -> Credit:
        return spread(rollouts, [rollout_return(r) for r in rollouts])


@dataclass(frozen=True, slots=True)
class ConstantCredit:
    """The same weight for every turn."""

    value: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ConfigError(f"ConstantCredit.value={self.value!r}: must be finite")

    def compute(self, rollouts: Sequence[Rollout]) -> Credit:
        for rollout in rollouts:
            rollout_return(rollout)  # must be finite here too
        return spread(rollouts, [self.value] * len(rollouts))


@dataclass(frozen=True, slots=True)
class GroupNormalizedReturn:
    """R − mean of the group; ÷ (the group's std, ddof 1, + `eps`) with `normalize_adv`.

    Groups are per role: rollouts that share `group_id` and `agent_id`. Each must have exactly
    `group_size` members, unless `allow_partial` lets those that are left be compared with each
    other (one alone gets 0). Sub-agents' rollouts, of which an episode may have any number, are
    compared with all others of their role in the group. A group without variance gets exactly 0.
    `summaries` says whether those by which a dialogue was compacted get the advantage, too.
    """

    group_size: int
    normalize_adv: bool = False
    eps: float = 1e-4
    allow_partial: bool = False
    summaries: SummaryCredit = "advantage"

    def __post_init__(self) -> None:
        check_group_credit(self.group_size, self.summaries)

    def with_partial_groups(self) -> GroupNormalizedReturn:
        return replace(self, allow_partial=True)

    def compute(self, rollouts: Sequence[Rollout]) -> Credit:
        returns = np.array([rollout_return(r) for r in rollouts], dtype=np.float64)
        weights = np.zeros(len(rollouts))
        for members in role_groups(rollouts, self.group_size, self.allow_partial):
            centred = centre(returns[members])
            if self.normalize_adv and len(members) > 1:
                centred = centred / (returns[members].std(ddof=1) + self.eps)
            weights[members] = centred
        return spread(rollouts, weights.tolist(), self.summaries)


@dataclass(frozen=True, slots=True)
class HybridNormalizedReturn:
    """(R − mean of the group) ÷ (std over the batch of these differences, ddof 1, + `eps`).

    With `filter_zvp`, groups without variance (prompts of zero variance) are left out of the
    batch's std; `drop_zero_variance_groups` then takes them out of the batch. `summaries` is as in
    `GroupNormalizedReturn`.
    """

    group_size: int
    eps: float = 1e-4
    filter_zvp: bool = True
    allow_partial: bool = False
    summaries: SummaryCredit = "advantage"

    def __post_init__(self) -> None:
        check_group_credit(self.group_size, self.summaries)

    def with_partial_groups(self) -> HybridNormalizedReturn:
        return replace(self, allow_partial=True)

    def compute(self, rollouts: Sequence[Rollout]) -> Credit:
        returns = np.array([rollout_return(r) for r in rollouts], dtype=np.float64)
        centred = np.zeros(len(rollouts))
        counted = np.zeros(len(rollouts), dtype=bool)
        for members in role_groups(rollouts, self.group_size, self.allow_partial):
            centred[members] = centre(returns[members])
            counted[members] = not self.filter_zvp or np.any(centred[members] != 0)
        std = centred[counted].std(ddof=1) if counted.sum() > 1 else 0.0
        return spread(rollouts, (centred / (std + self.eps)).tolist(), self.summaries)


def centre(returns: NDArray[np.float64]) -> NDArray[np.float64]:
    """The returns minus their mean; exactly 0 where all are equal, which rounding would spoil."""
    if returns.max() == returns.min():
        return np.zeros_like(returns)
    return returns - float(returns.mean())


def check_group_credit(group_size: int, summaries: str) -> None:
    """Raises `ConfigError` for a group with nothing to compare, and for no `SummaryCredit`."""
    if group_size < 2:
        raise ConfigError(f"group_size={group_size}: a group needs at least 2 members to compare")
    if summaries not in ("advantage", "none"):
        raise ConfigError(f"summaries={summaries!r}: must be 'advantage' or 'none'")


def role_groups(
    rollouts: Sequence[Rollout], group_size: int, allow_partial: bool = False
) -> list[NDArray[np.intp]]:
    """The positions of each group's members: rollouts of one `group_id` and one `agent_id`.

    Raises `CreditError` for a rollout without a group and for a group of another size.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for position, rollout in enumerate(rollouts):
        if rollout.group_id is None:
            raise CreditError(
                f"rollout {rollout.id!r} has no group_id, but its credit is relative to a group: "
                f"expand the requests with GRPORequestStrategy(group_size={group_size})"
            )
        groups.setdefault((rollout.group_id, rollout.agent_id), []).append(position)
    for (group_id, agent_id), members in groups.items():
        sub_agents = all(rollouts[m].parent_id is not None for m in members)
        partial = allow_partial and len(members) < group_size
        if len(members) == group_size or sub_agents or partial:
            continue
        ids = [rollouts[m].id for m in members]
        raise CreditError(
            f"group {group_id!r} has {len(members)} rollouts of agent {agent_id!r}, not "
            f"group_size={group_size}: {ids}. Drop groups that lost a member "
            '(lost_member="drop_group"), or set allow_partial=True on the credit assigner'
        )
    return [np.array(members, dtype=np.intp) for members in groups.values()]
