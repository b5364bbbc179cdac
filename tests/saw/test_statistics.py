from __future__ import annotations

from dataclasses import replace

import pytest

from ludic.saw import rollout_statistics
from ludic.types import EnvironmentStep
from tests.oracles.rollouts import make_rollout


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
