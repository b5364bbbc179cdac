from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from ludic.errors import CreditError
from ludic.saw import (
    batch_from_rollouts,
    drop_parse_errors,
    group_by_role,
)
from ludic.training.credit_assignment.returns import (
    ConstantCredit,
    GroupNormalizedReturn,
    MonteCarloReturn,
)
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Rollout,
    RolloutStepKey,
    TokenTrace,
    VersionSpan,
)


def rollout(
    name: str,
    reward: float = 0.0,
    *,
    group: str | None = None,
    agent: str = "agent",
    error: str | None = None,
    version: int = 0,
) -> Rollout:
    call = AgentStep(
        0,
        (),
        {"role": "assistant", "content": "x"},
        FinishReason.STOP,
        TokenTrace((1, 2), (3, 4), (-1.0, -1.0), (VersionSpan(0, 2, version),)),
    )
    step = EnvironmentStep(0, (0,), "o", "a", "n", reward, terminated=True)
    return Rollout(name, (call, step), agent_id=agent, episode_id=name, group_id=group, error=error)


def test_a_group_that_lost_a_member_is_dropped_whole_and_counted() -> None:
    rollouts = [
        rollout("a", 1.0, group="g"),
        rollout("b", 0.0, group="g", error="boom"),
        rollout("c", 1.0, group="h"),
        rollout("d", 0.0, group="h"),
    ]
    batch = batch_from_rollouts(rollouts, GroupNormalizedReturn(2))
    assert [i.rollout_id for i in batch.items] == ["c", "d"]
    assert batch.meta["dropped"] == {"group_lost_member": 1, "rollout_error": 1}
    assert batch.meta["failed_rate"] == 0.25


def test_a_partial_group_is_kept_where_the_policy_and_the_credit_say_so() -> None:
    rollouts = [
        rollout("a", 1.0, group="g"),
        rollout("b", 0.0, group="g"),
        rollout("c", 0.0, group="g", error="boom"),
    ]
    credit = GroupNormalizedReturn(3, allow_partial=True)
    batch = batch_from_rollouts(rollouts, credit, lost_member="keep_partial")
    assert [i.weight for i in batch.items] == [0.5, -0.5]
    with pytest.raises(CreditError, match="group_size=3"):
        batch_from_rollouts(rollouts, GroupNormalizedReturn(3), lost_member="keep_partial")


def test_a_group_with_a_missing_member_is_an_error_that_names_it() -> None:
    with pytest.raises(CreditError, match="'g/agent' has 1 rollouts"):
        batch_from_rollouts([rollout("a", 1.0, group="g")], GroupNormalizedReturn(2))


def test_groups_of_several_agents_are_formed_per_role() -> None:
    rollouts = [
        rollout(f"{agent}{i}", float(i if agent == "X" else -i), group="g", agent=agent)
        for i in range(2)
        for agent in ("X", "O")
    ]
    batch = batch_from_rollouts(rollouts, GroupNormalizedReturn(2))
    assert {i.group_id for i in batch.items} == {"g/X", "g/O"}
    assert {i.rollout_id: i.weight for i in batch.items} == {
        "X0": -0.5,
        "X1": 0.5,
        "O0": 0.5,
        "O1": -0.5,
    }
    assert batch.counts.groups == 2
    assert group_by_role([rollout("a")])[0].group_id is None


def test_credit_for_steps_in_the_place_of_turns_is_refused() -> None:
    class BySteps:
        def compute(self, rollouts: Sequence[Rollout]) -> Mapping[RolloutStepKey, float]:
            return {(r.id, i): 1.0 for r in rollouts for i, _ in enumerate(r.steps)}

    with pytest.raises(CreditError, match=r"turn 1 of rollout 'a', whose turns are \[0\]"):
        batch_from_rollouts([rollout("a")], BySteps())


def test_turns_without_credit_are_counted() -> None:
    class Forgets:
        def compute(self, rollouts: Sequence[Rollout]) -> Mapping[RolloutStepKey, float]:
            return {("a", 0): 1.0}

    batch = batch_from_rollouts([rollout("a"), rollout("b")], Forgets())
    assert [i.rollout_id for i in batch.items] == ["a"]
    assert batch.meta["dropped"] == {"no_credit": 1}


def test_meta_tells_rewards_lengths_endings_and_versions() -> None:
    batch = batch_from_rollouts(
        [rollout("a", 1.0, version=7), rollout("b", 0.0, version=5)],
        MonteCarloReturn(),
        sample_filter=drop_parse_errors(),
        drops={"earlier": 3},
        meta={"mine": "yes"},
    )
    meta = batch.meta
    assert meta["reward_mean"] == 0.5
    assert meta["completion_tokens_mean"] == 2.0
    assert meta["terminated_rate"] == 1.0
    assert (meta["version_max"], meta["version_min"]) == (7, 5)
    assert meta["dropped"] == {"earlier": 3}
    assert meta["mine"] == "yes"


def test_no_rollouts_make_an_empty_batch() -> None:
    batch = batch_from_rollouts([rollout("a", error="boom")], ConstantCredit())
    assert batch.items == ()
    assert batch.meta["dropped"] == {"rollout_error": 1}


def test_turns_that_extend_each_other_are_one_row_unless_told_otherwise() -> None:
    first = rollout("a")
    again = AgentStep(
        1,
        (),
        {"role": "assistant", "content": "y"},
        FinishReason.STOP,
        TokenTrace((1, 2, 3, 4, 5), (6,), (-1.0,), (VersionSpan(0, 1, 0),)),
    )
    second = EnvironmentStep(1, (2,), "n", "b", "e", 1.0, terminated=True)
    opened = replace(first.env_steps[0], terminated=False)
    two_turns = replace(first, steps=(first.steps[0], opened, again, second))
    batch = batch_from_rollouts([two_turns], MonteCarloReturn())
    assert [item.input_ids.tolist() for item in batch.items] == [[1, 2, 3, 4, 5, 6]]
    apart = batch_from_rollouts([two_turns], MonteCarloReturn(), merge=False)
    assert [i.input_ids.tolist() for i in apart.items] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
