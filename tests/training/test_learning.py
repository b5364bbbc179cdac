"""It learns: from random words to nearly the best return, within a stated number of steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ludic.training.algorithm import RLAlgorithm
from ludic.training.algorithms.cispo import make_cispo
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.algorithms.reinforce import make_reinforce
from tests.training.learning import bandit, key_door, learn

ALGORITHMS = {
    "reinforce": make_reinforce,
    "grpo": lambda: make_grpo(group_size=8),
    "cispo": lambda: make_cispo(group_size=8),
}
BANDIT_STEPS = 40
KEY_DOOR_STEPS = 80
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
make_algorithm = pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS.keys())


@make_algorithm
async def test_the_best_lever_is_pulled_nearly_always(
    tmp_path: Path, make: Callable[[], RLAlgorithm]
) -> None:
    world = bandit()
    outcome = await learn(world, make(), tmp_path, steps=BANDIT_STEPS, learning_rate=2e-3)
    assert outcome.returns[0] < 0.6 * world.best
    assert outcome.last() > 0.95 * world.best


@make_algorithm
async def test_the_key_is_fetched_and_the_door_passed_on_nearly_the_shortest_way(
    tmp_path: Path, make: Callable[[], RLAlgorithm]
) -> None:
    world = key_door()
    outcome = await learn(world, make(), tmp_path, steps=KEY_DOOR_STEPS, learning_rate=2e-3)
    assert outcome.returns[0] < 0.3 * world.best
    assert outcome.last() > 0.9 * world.best
