"""The key and the door: levels can be solved, the optimum is the optimum, limits truncate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.envs import EnvRunner, KeyDoorEnv
from ludic.envs.key_door import MOVES, Level
from ludic.errors import ConfigError, EnvError
from ludic.types import StepOutcome

SEEDS = st.integers(0, 2**63 - 1)


def step(env: KeyDoorEnv, action: str) -> StepOutcome:
    outcomes = env.step({"agent": action})
    assert isinstance(outcomes, Mapping)
    return outcomes["agent"]


def solve(env: KeyDoorEnv, seed: int) -> tuple[float, StepOutcome]:
    """The return of the shortest solution, played, and its last outcome."""
    env.reset(seed=seed)
    solution = env.level(seed).shortest_solution()
    assert solution is not None
    outcomes = [step(env, move) for move in solution]
    assert not any(o.terminated or o.truncated for o in outcomes[:-1])
    return sum(o.reward for o in outcomes), outcomes[-1]


@pytest.mark.parametrize("size", [(3, 2), (4, 4), (7, 5), (12, 9)])
@given(seed=SEEDS)
def test_the_shortest_solution_reaches_the_goal_with_the_optimal_return(
    size: tuple[int, int], seed: int
) -> None:
    env = KeyDoorEnv(width=size[0], height=size[1], wall_density=0.2)
    total, last = solve(env, seed)
    assert last.terminated
    assert total == pytest.approx(env.optimal_return(seed))


@given(seed=st.integers(0, 200))
def test_no_sequence_of_moves_does_better_on_small_levels(seed: int) -> None:
    """Brute force: every sequence shorter than the solution fails to reach the goal."""
    env = KeyDoorEnv(width=3, height=2, wall_density=0.0, step_cost=0.1)
    solution = env.level(seed).shortest_solution()
    assert solution is not None
    for moves in product(MOVES, repeat=min(len(solution) - 1, 6)):
        env.reset(seed=seed)
        assert not any(step(env, move).terminated for move in moves)


def test_the_door_needs_the_key() -> None:
    level = Level(3, 2, frozenset({(1, 1)}), (0, 0), (0, 1), (1, 0), (2, 0))
    assert level.shortest_solution() == ("south", "north", "east", "east")
    assert level.next_cell((0, 0), False, "east") == (0, 0)
    assert level.next_cell((0, 0), True, "east") == (1, 0)


def test_a_level_without_a_way_has_no_solution() -> None:
    walled = frozenset({(1, 1), (0, 1)})
    assert Level(3, 2, walled, (0, 0), (0, 1), (1, 0), (2, 0)).shortest_solution() is None


@given(seed=SEEDS)
def test_the_same_seed_and_actions_give_the_same_episode(seed: int) -> None:
    def episode() -> list[Any]:
        env = KeyDoorEnv()
        return [env.reset(seed=seed), *(step(env, move) for move in ("north", "east", "x"))]

    assert episode() == episode()


def test_levels_differ_between_seeds() -> None:
    env = KeyDoorEnv()
    assert len({env.level(seed) for seed in range(50)}) > 40


def test_only_the_cells_around_the_agent_are_seen() -> None:
    env = KeyDoorEnv(width=9, height=9, view=2)
    env.reset(seed=1)
    obs = env.env_current_obs()
    rows = obs.splitlines()
    assert [len(row) for row in rows[:5]] == [5] * 5
    assert rows[2][2] == "@"
    assert rows[5:] == ["You have no key."]


def test_the_key_is_taken_by_walking_over_it() -> None:
    env = KeyDoorEnv()
    env.reset(seed=2)
    solution = env.level(2).shortest_solution()
    assert solution is not None
    notes = [step(env, move).obs for move in solution]
    assert sum("You took the key." in note for note in notes) == 1
    assert "You have the key." in notes[-1]
    assert notes[-1].startswith("You reached the goal.")


def test_the_step_limit_is_a_truncation_and_not_an_end() -> None:
    env = KeyDoorEnv(max_steps=3, step_cost=0.5)
    env.reset(seed=0)
    outcomes = [step(env, "jump") for _ in range(3)]
    assert [o.truncated for o in outcomes] == [False, False, True]
    assert not any(o.terminated for o in outcomes)
    assert [o.reward for o in outcomes] == [-0.5] * 3
    with pytest.raises(EnvError, match="reset it first"):
        step(env, "north")


def test_when_the_limit_is_too_short_the_optimum_says_so() -> None:
    env = KeyDoorEnv(max_steps=1, step_cost=0.5)
    assert env.optimal_return(0) == -0.5


def test_reaching_the_goal_in_the_last_step_is_no_truncation() -> None:
    steps = len(KeyDoorEnv().level(4).shortest_solution() or ())
    _, last = solve(KeyDoorEnv(max_steps=steps), 4)
    assert (last.terminated, last.truncated) == (True, False)


@pytest.mark.parametrize("action", ["", "up", "north " * 1000, "\x00"])
def test_an_action_that_is_no_direction_costs_a_step_and_changes_nothing(action: str) -> None:
    env = KeyDoorEnv()
    env.reset(seed=0)
    before = env.env_current_obs()
    outcome = step(env, action)
    assert outcome.obs == f"That is no direction.\n{before}"
    assert outcome.reward == -0.01


async def test_it_keeps_the_contract() -> None:
    runner = EnvRunner(KeyDoorEnv(max_steps=50))
    await runner.reset(0)
    while not runner.done:
        await runner.step({"agent": "east"})
    await runner.close()


@pytest.mark.parametrize(
    "options",
    [
        {"width": 2},
        {"height": 1},
        {"width": 1000, "height": 1000},
        {"wall_density": 0.9},
        {"view": 0},
        {"step_cost": -1},
        {"goal_reward": 0},
        {"step_cost": math.nan},
        {"goal_reward": math.inf},
        {"max_steps": 0},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="KeyDoorEnv"):
        KeyDoorEnv(**options)


def test_returns_lie_in_the_range_that_it_states() -> None:
    env = KeyDoorEnv(max_steps=7)
    assert env.return_range == (-0.07, 0.99)
    assert env.return_range[0] <= env.optimal_return(3) <= env.return_range[1]
