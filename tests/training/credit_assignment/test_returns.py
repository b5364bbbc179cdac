"""Credit against its plain references, and what happens to groups that are not whole."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ludic.errors import ConfigError, CreditError
from ludic.training import (
    ConstantCredit,
    EpisodicReturn,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    MonteCarloReturn,
    PerStepReward,
)
from ludic.training.credit_assignment.returns import (
    compactions,
    role_groups,
    rollout_return,
    spread,
    turn_rewards,
)
from ludic.types import AgentStep, EnvironmentStep, FinishReason, Message, Rollout
from tests.oracles import credit as oracle
from tests.oracles.rollouts import make_rollout

rewards = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=5)


def weights_of(weights: object, rollout: Rollout) -> list[float]:
    assert isinstance(weights, dict)
    return [weights[rollout.id, turn] for turn in range(len(rollout.agent_steps))]


@given(rewards=rewards, gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_monte_carlo_returns_are_the_discounted_sums(rewards: list[float], gamma: float) -> None:
    rollout = make_rollout("a", rewards)
    found = weights_of(MonteCarloReturn(gamma).compute([rollout]), rollout)
    assert found == pytest.approx(oracle.monte_carlo(rewards, gamma))


def test_a_compaction_discounts_nothing_whatever_comes_after_it() -> None:
    rollout = make_rollout("a", [1.0, 0.0, 4.0, 8.0])
    steps = list(rollout.steps)
    summary = steps[3]
    assert isinstance(summary, EnvironmentStep)
    steps[3] = replace(summary, stepped=False, info={"compacted": True})
    compacted = replace(rollout, steps=tuple(steps))
    found = weights_of(MonteCarloReturn(0.5).compute([compacted]), compacted)
    assert found == [1.0 + 0.5 * 8.0, 8.0, 4.0 + 0.5 * 8.0, 8.0]
    assert compactions(compacted) == {1}
    assert spread([compacted], [2.0]) == {("a", turn): 2.0 for turn in range(4)}
    assert spread([compacted], [2.0], "none") == {("a", turn): 2.0 for turn in (0, 2, 3)}


def test_every_rollout_needs_a_weight() -> None:
    rollouts = [make_rollout("a", [0.0, 1.0]), make_rollout("b", [1.0])]
    assert spread(rollouts, [2.0, 3.0]) == {("a", 0): 2.0, ("a", 1): 2.0, ("b", 0): 3.0}
    with pytest.raises(ValueError, match="zip"):
        spread(rollouts, [2.0])


def test_what_was_heard_without_acting_counts_undiscounted_to_the_turn_before() -> None:
    rollout = make_rollout("a", [0.0, 1.0], heard=[3.0, -1.0])
    found = weights_of(MonteCarloReturn(0.5).compute([rollout]), rollout)
    assert found == [0.5 * (1.0 + 2.0), 3.0]
    assert weights_of(PerStepReward().compute([rollout]), rollout) == [0.0, 3.0]


def test_an_agent_that_never_acted_gets_no_credit() -> None:
    assert MonteCarloReturn().compute([make_rollout("a", [], heard=[1.0])]) == {}


@pytest.mark.parametrize("assigner", [GroupNormalizedReturn(3), HybridNormalizedReturn(3)])
def test_what_an_agent_heard_without_ever_acting_counts_in_its_group(
    assigner: GroupNormalizedReturn | HybridNormalizedReturn,
) -> None:
    lost_unmoved = make_rollout("c", [], heard=[-1.0], group="g")
    played = [make_rollout("a", [1.0], group="g"), make_rollout("b", [-1.0], group="g")]
    credit = assigner.compute([*played, lost_unmoved])
    same = assigner.compute([*played, make_rollout("c", [-1.0], group="g")])
    assert credit == {key: weight for key, weight in same.items() if key[0] != "c"}
    assert rollout_return(lost_unmoved) == lost_unmoved.total_reward == -1.0


def test_a_turn_without_a_call_counts_to_the_turn_before_or_to_the_first() -> None:
    call = AgentStep(2, (), Message(role="assistant", content="move"), FinishReason.STOP)

    def outcome(turn: int, calls: tuple[int, ...], reward: float) -> EnvironmentStep:
        return EnvironmentStep(turn, calls, "", "move" if calls else None, "", reward)

    steps = (
        outcome(0, (), 1.0),
        outcome(1, (), 2.0),
        call,
        outcome(2, (2,), 4.0),
        replace(call, turn_index=3),
        outcome(3, (4,), 8.0),
        replace(call, turn_index=4),
        outcome(4, (6,), 16.0),
        outcome(5, (), 32.0),
    )
    assert turn_rewards(Rollout("a", steps)) == [(2, 7.0), (3, 8.0), (4, 48.0)]


@pytest.mark.parametrize("credit", [EpisodicReturn(), MonteCarloReturn()])
def test_rewards_that_add_up_to_more_than_a_float_are_named(credit: Any) -> None:
    rollout = make_rollout("a", [1e308, 1e308])
    with pytest.raises(CreditError, match=r"'a': its 2 rewards, up to 1e\+308, .* scale"):
        credit.compute([rollout])
    largest = make_rollout("a", [1e150])
    assert credit.compute([largest]) == {("a", 0): 1e150}


@given(rewards=rewards)
def test_simple_assigners_do_as_named(rewards: list[float]) -> None:
    rollout = make_rollout("a", rewards)
    n = len(rewards)
    assert weights_of(PerStepReward().compute([rollout]), rollout) == rewards
    assert weights_of(EpisodicReturn().compute([rollout]), rollout) == [sum(rewards)] * n
    assert weights_of(ConstantCredit(2.5).compute([rollout]), rollout) == [2.5] * n


groups = st.integers(2, 4).flatmap(
    lambda size: st.lists(st.lists(rewards, min_size=size, max_size=size), min_size=1, max_size=4)
)


def make_groups(groups: list[list[list[float]]]) -> list[Rollout]:
    return [
        make_rollout(f"{g}-{r}", rewards, group=f"g{g}")
        for g, members in enumerate(groups)
        for r, rewards in enumerate(members)
    ]


@given(groups=groups, normalize=st.booleans(), seed=st.integers(0, 99))
def test_group_credit_is_that_of_the_reference_in_any_order(
    groups: list[list[list[float]]], normalize: bool, seed: int
) -> None:
    rollouts = make_groups(groups)
    shuffled = random.Random(seed).sample(rollouts, len(rollouts))
    weights = GroupNormalizedReturn(len(groups[0]), normalize).compute(shuffled)
    for g, members in enumerate(groups):
        expected = oracle.group_advantages([sum(m) for m in members], normalize)
        for r, weight in enumerate(expected):
            rollout = rollouts[g * len(groups[0]) + r]
            found = weights_of(weights, rollout)
            assert found == pytest.approx([weight] * len(members[r]), abs=1e-9)


@given(groups=groups, drop=st.booleans())
def test_hybrid_credit_is_that_of_the_reference(
    groups: list[list[list[float]]], drop: bool
) -> None:
    rollouts = make_groups(groups)
    weights = HybridNormalizedReturn(len(groups[0]), filter_zvp=drop).compute(rollouts)
    expected = oracle.hybrid_advantages([[sum(m) for m in members] for members in groups], drop)
    flat = [weight for members in expected for weight in members]
    for rollout, weight in zip(rollouts, flat, strict=True):
        found = weights_of(weights, rollout)
        assert found == pytest.approx([weight] * len(found), rel=1e-9, abs=1e-9)


@given(groups=groups)
def test_group_credit_sums_to_zero_and_is_g_minus_one_over_g_of_leave_one_out(
    groups: list[list[list[float]]],
) -> None:
    size = len(groups[0])
    weights = GroupNormalizedReturn(size).compute(make_groups(groups))
    for g, members in enumerate(groups):
        mine = [weights[f"g{g}"[1:] + f"-{r}", 0] for r in range(size)]
        rloo = oracle.leave_one_out([sum(m) for m in members])
        assert sum(mine) == pytest.approx(0, abs=1e-9)
        assert mine == pytest.approx([w * (size - 1) / size for w in rloo], abs=1e-9)


@pytest.mark.parametrize("assigner", [GroupNormalizedReturn(3, True), HybridNormalizedReturn(3)])
def test_a_group_without_variance_gets_exactly_zero(assigner: GroupNormalizedReturn) -> None:
    # 0.1 three times has a mean of 0.10000000000000002: rounding must not make a gradient of it.
    rollouts = [make_rollout(str(i), [0.1], group="g") for i in range(3)]
    assert set(assigner.compute(rollouts).values()) == {0.0}


def test_groups_are_formed_per_role() -> None:
    rollouts = [
        make_rollout(f"{role}{i}", [reward], group="g", agent=role)
        for role, rewards in (("cop", [1.0, 0.0]), ("thief", [5.0, 3.0]))
        for i, reward in enumerate(rewards)
    ]
    weights = GroupNormalizedReturn(2).compute(rollouts)
    assert [weights[r.id, 0] for r in rollouts] == [0.5, -0.5, 1.0, -1.0]


def test_any_number_of_sub_agents_is_compared_within_the_role() -> None:
    parents = [make_rollout(f"p{i}", [float(i)], group="g", agent="lead") for i in range(2)]
    children = [
        make_rollout(f"c{i}", [float(i)], group="g", agent="helper", parent="p0") for i in range(3)
    ]
    weights = GroupNormalizedReturn(2).compute(parents + children)
    assert [weights[f"c{i}", 0] for i in range(3)] == [-1.0, 0.0, 1.0]


def test_a_group_with_a_missing_member_is_an_error_that_names_it() -> None:
    whole = [make_rollout(f"whole-{i}", [1.0], group="g6") for i in range(4)]
    rollouts = [make_rollout(str(i), [1.0], group="g7") for i in range(3)]
    with pytest.raises(CreditError, match=r"group 'g7' has 3 rollouts .* group_size=4"):
        GroupNormalizedReturn(4).compute([*whole, *rollouts])
    with pytest.raises(CreditError, match="group 'g7'"):
        HybridNormalizedReturn(4).compute([*whole, *rollouts])
    with pytest.raises(CreditError, match="group 'g7'"):
        role_groups([*whole, *rollouts], 4)


def test_a_partial_group_may_be_allowed_and_one_left_alone_gets_zero() -> None:
    pair = [make_rollout(str(i), [float(i)], group="pair") for i in range(2)]
    alone = make_rollout("alone", [9.0], group="single")
    weights = GroupNormalizedReturn(4, True, allow_partial=True).compute([*pair, alone])
    assert weights["alone", 0] == 0
    hybrid = HybridNormalizedReturn(4, filter_zvp=False, allow_partial=True)
    assert hybrid.compute([alone]) == {("alone", 0): 0}
    assert weights["1", 0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))


def test_a_group_that_is_too_large_is_an_error_even_where_partial_ones_are_allowed() -> None:
    alone = make_rollout("alone", [1.0], group="partial")
    rollouts = [make_rollout(str(i), [1.0], group="g") for i in range(3)]
    with pytest.raises(CreditError, match="3 rollouts"):
        GroupNormalizedReturn(2, allow_partial=True).compute([alone, *rollouts])


def test_a_rollout_without_a_group_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(CreditError, match=r"'lonely' has no group_id.*GRPORequestStrategy"):
        GroupNormalizedReturn(2).compute([make_rollout("lonely", [1.0])])


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        GroupNormalizedReturn(1)
    for gamma in (1.001, -1e-9, math.nan):
        with pytest.raises(ConfigError, match="gamma"):
            MonteCarloReturn(gamma)
    with pytest.raises(ConfigError, match="finite"):
        ConstantCredit(math.nan)


def test_what_is_not_set_changes_nothing() -> None:
    assert MonteCarloReturn() == MonteCarloReturn(1.0)
    assert ConstantCredit() == ConstantCredit(1.0)
    assert GroupNormalizedReturn(2) == GroupNormalizedReturn(2, False, 1e-4, False, "advantage")
    assert HybridNormalizedReturn(2) == HybridNormalizedReturn(2, 1e-4, True, False, "advantage")
    assert GroupNormalizedReturn(2).with_partial_groups().allow_partial
    assert HybridNormalizedReturn(2).with_partial_groups().allow_partial
