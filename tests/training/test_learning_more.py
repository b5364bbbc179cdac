"""Every other preset learns, too: the best lever, from random words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ludic.training import (
    RLAlgorithm,
    make_dr_grpo,
    make_gmpo,
    make_gspo,
    make_sapo,
    make_scalerl,
    make_spo,
)
from tests.training.learning import bandit, learn

DRIFT = {"half_life": 0.06}
ALGORITHMS: dict[str, Callable[[], RLAlgorithm]] = {
    # An answer that cannot be read costs 0.2, so returns are not in [0, 1].
    "spo": lambda: make_spo(forgetting=DRIFT, returns=(-0.2, 1.0)),
    "gspo": lambda: make_gspo(group_size=8),
    "sapo": lambda: make_sapo(group_size=8),
    "gmpo": lambda: make_gmpo(group_size=8),
    "dr_grpo": lambda: make_dr_grpo(group_size=8),
    "scalerl": lambda: make_scalerl(group_size=8),
}
STEPS = 40
LEARNING_RATE = {"scalerl": 1e-3}
# ScaleRL leaves out groups that all did equally well, also in its mean return: that of what is
# still undecided, and of nothing once all is solved.
GOAL = {"scalerl": 0.9}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_the_best_lever_is_pulled_nearly_always(tmp_path: Path, name: str) -> None:
    world, rate = bandit(), LEARNING_RATE.get(name, 2e-3)
    outcome = await learn(world, ALGORITHMS[name](), tmp_path, steps=STEPS, learning_rate=rate)
    assert outcome.returns[0] < 0.6 * world.best
    assert outcome.last() > GOAL.get(name, 0.95) * world.best
