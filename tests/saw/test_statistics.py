from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ludic.saw import SampleAttachments, SAWItem, item_statistics, rollout_statistics
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Fork,
    ForkReason,
    Rollout,
    Step,
    TruncationReason,
)
from tests.oracles.rollouts import make_rollout


def test_a_group_has_variance_if_one_of_its_roles_has() -> None:
    rewards = {"a": (1.0, 1.0), "b": (0.0, 1.0), "c": (0.0, 0.0)}
    rollouts = [
        make_rollout(f"{group}{i}", [reward], group=group)
        for group, pair in rewards.items()
        for i, reward in enumerate(pair)
    ]
    assert rollout_statistics(rollouts)["no_variance_group_rate"] == pytest.approx(2 / 3)
    seats = [
        make_rollout(f"{seat}{i}", [1.0 if seat == "X" else -1.0], group="g", agent=seat)
        for seat in "XO"
        for i in range(2)
    ]
    assert rollout_statistics(seats)["no_variance_group_rate"] == 1.0
    assert (
        rollout_statistics([*seats, make_rollout("O2", [1.0], group="g", agent="O")])[
            "no_variance_group_rate"
        ]
        == 0.0
    )


def test_the_order_of_rewards_is_no_variance() -> None:
    group = [
        make_rollout("a", [0.7, 0.1, 0.1, 0.1], group="g"),
        make_rollout("b", [0.1, 0.1, 0.1, 0.7], group="g"),
    ]
    stats = rollout_statistics(group)
    assert (stats["no_variance_group_rate"], stats["reward_std"]) == (1.0, 0.0)


def test_rollouts_without_groups_have_no_rate_of_groups() -> None:
    alone = [make_rollout("a", [1.0]), make_rollout("b", [1.0], group="g")]
    assert "no_variance_group_rate" not in rollout_statistics(alone)


def test_the_parts_of_the_reward_are_averaged_over_rollouts() -> None:
    rollout = make_rollout("a", [1.0, 2.0])
    steps = tuple(
        replace(s, reward_components={"env": s.reward, "parser": 0.5})
        if isinstance(s, EnvironmentStep)
        else s
        for s in rollout.steps
    )
    stats = rollout_statistics([replace(rollout, steps=steps), make_rollout("b", [0.0])])
    assert stats["reward_env_mean"] == pytest.approx(1.5)
    assert stats["reward_parser_mean"] == pytest.approx(0.5)


def last_step(rollout: Rollout, **changes: Any) -> Rollout:
    return replace(rollout, steps=(*rollout.steps[:-1], replace(rollout.steps[-1], **changes)))


def first_call(rollout: Rollout, **changes: Any) -> Rollout:
    return replace(rollout, steps=(replace(rollout.steps[0], **changes), *rollout.steps[1:]))


def test_every_figure_of_four_rollouts_counted_by_hand() -> None:
    ended = last_step(make_rollout("a", [1.0, 2.0, 3.0]), terminated=True)
    cut = last_step(
        make_rollout("b", [-1.0]), truncated=True, truncation_reason=TruncationReason.MAX_STEPS
    )
    cut = first_call(cut, finish_reason=FinishReason.LENGTH)
    wrong = last_step(make_rollout("c", [0.5, 0.5]), stepped=False, info={"parse_error": True})
    wrong = first_call(wrong, fork=Fork(ForkReason.TOOLS_CHANGED))
    failed = make_rollout("d", [9.0], error="the env raised")
    assert rollout_statistics([ended, cut, wrong, failed]) == {
        "rollouts_sampled": 4,
        "episodes": 4,
        "failed_episodes": 1,
        "failed_rate": 1 / 4,
        "reward_mean": pytest.approx((6 - 1 + 1) / 3),
        "reward_std": pytest.approx(np.std([6.0, -1.0, 1.0])),
        "reward_min": -1.0,
        "reward_max": 6.0,
        "turns_mean": 2.0,
        "calls_mean": 2.0,
        "completion_tokens": 12,
        "completion_tokens_mean": 4.0,
        "completion_tokens_max": 6,
        "prompt_tokens_max": 9,
        "terminated_rate": 1 / 3,
        "truncated_rate": 1 / 3,
        "parse_error_rate": 1 / 6,
        "cut_completion_rate": 1 / 6,
        "forks": {"tools_changed": 1},
    }


def test_several_calls_of_a_turn_are_one_turn_and_several_calls() -> None:
    rollout = make_rollout("a", [1.0])
    call, outcome = rollout.steps
    assert isinstance(call, AgentStep)
    assert isinstance(outcome, EnvironmentStep)
    steps: tuple[Step, ...] = (call, call, replace(outcome, agent_steps=(0, 1)))
    stats = rollout_statistics([replace(rollout, steps=steps)])
    assert (stats["turns_mean"], stats["calls_mean"]) == (1.0, 2.0)


def test_compactions_are_averaged_over_rollouts_and_are_no_failed_moves() -> None:
    outcome = {"compacted": True, "parse_error": True}
    rollouts = [last_step(make_rollout(name, [0.0, 0.0]), info=outcome) for name in "abc"]
    stats = rollout_statistics([*rollouts, make_rollout("d", [0.0])])
    assert stats["compactions_mean"] == 3 / 4
    assert stats["parse_error_rate"] == 0.0
    assert "compactions_mean" not in rollout_statistics([make_rollout("d", [0.0])])


def test_seats_of_one_episode_count_as_one_episode() -> None:
    seats = [replace(make_rollout(seat, [1.0], agent=seat), episode_id="e") for seat in "XO"]
    assert rollout_statistics(seats)["episodes"] == 1


def test_an_episode_has_failed_whichever_of_its_rollouts_did() -> None:
    parent, child = make_rollout("p", [1.0]), make_rollout("c", [], parent="p", error="no")
    for order in ([parent, child], [child, parent]):
        stats = rollout_statistics([replace(r, episode_id="e") for r in order])
        assert (stats["failed_episodes"], stats["failed_rate"]) == (1, 1.0)


def test_where_nothing_was_sampled_or_all_failed_only_the_counts_are_there() -> None:
    assert rollout_statistics([]) == {"rollouts_sampled": 0}
    assert rollout_statistics([make_rollout("d", [9.0], error="no")]) == {
        "rollouts_sampled": 1,
        "episodes": 1,
        "failed_episodes": 1,
        "failed_rate": 1.0,
    }


def test_an_agent_that_never_acted_has_no_calls_to_count() -> None:
    stats = rollout_statistics([make_rollout("a", [], heard=[-1.0])])
    assert stats["reward_mean"] == -1.0
    for name in ("turns_mean", "calls_mean", "prompt_tokens_max", "parse_error_rate"):
        assert stats[name] == 0


def test_items_are_counted_in_tokens_and_versions_that_are_known() -> None:
    def item(length: int, versions: list[int] | None) -> SAWItem:
        mask = np.ones(length, np.int8)
        known = None if versions is None else np.array(versions)
        return SAWItem(
            np.arange(length), mask, mask, 1.0, attachments=SampleAttachments(versions=known)
        )

    assert item_statistics([]) == {"items": 0, "tokens": 0}
    sizes = {"items": 2, "tokens": 7, "item_tokens_mean": 3.5, "item_tokens_max": 5}
    assert item_statistics([item(5, None), item(2, None)]) == sizes
    assert item_statistics([item(5, None), item(2, [-1, -1])]) == sizes
    spans = {"version_min": 3, "version_max": 8}
    assert item_statistics([item(5, [-1, 3, 4, 5, 8]), item(2, None)]) == sizes | spans
