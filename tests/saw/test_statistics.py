from __future__ import annotations

from dataclasses import replace

import pytest

from ludic.saw import rollout_statistics
from ludic.types import EnvironmentStep
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
