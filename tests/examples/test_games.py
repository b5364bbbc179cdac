"""The environments that the examples bring: what their evaluations promise is so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    before = list(sys.path)
    for folder in ("self_play", "tool_use", "delegation"):
        sys.path.insert(0, str(EXAMPLES / folder))
    yield
    sys.path[:] = before


def played(env: Any, seed: int, players: dict[str, Any]) -> dict[str, float]:
    """The rewards of a game of Nim."""
    shown = {agent: obs for agent, (obs, _) in env.reset(seed=seed).items()}
    rewards = dict.fromkeys(env.agent_ids, 0.0)
    while env.active_agents:
        (mover,) = env.active_agents
        for agent, outcome in env.step({mover: players[mover](shown[mover])}).items():
            shown[agent] = outcome.obs
            rewards[agent] += outcome.reward
    return rewards


def test_who_plays_nim_perfectly_wins_every_opening_that_can_be_won() -> None:
    nim = import_module("nim")
    env, rng, perfect = nim.Nim(high=11, winnable=True), Random(0), nim.Perfect()
    for seed in range(50):
        players = {"first": perfect.act, "second": lambda obs: nim.teacher(obs, rng)}
        assert played(env, seed, players) == {"first": 1.0, "second": -1.0}
        players = {"first": perfect.act, "second": perfect.act}
        assert played(env, seed, players) == {"first": 1.0, "second": -1.0}


@pytest.mark.parametrize("move", ["4", "0", "two", ""])
def test_who_takes_what_cannot_be_taken_loses(move: str) -> None:
    env = import_module("nim").Nim(low=3, high=3)
    env.reset(seed=0)
    outcomes = env.step({"first": move})
    assert (outcomes["first"].reward, outcomes["second"].reward) == (-1.0, 1.0)
    assert all(outcome.terminated for outcome in outcomes.values())


def test_the_teacher_of_long_sums_guesses_wrong_and_calls_right() -> None:
    sums = import_module("long_sums")
    rng, seen = Random(0), set()
    for seed in range(200):
        env = sums.LongSums()
        obs, _ = env.env_reset(seed=seed)
        said = sums.teacher(obs, rng, [{"role": "system", "content": ""}])
        if said.startswith("\\boxed{"):
            assert env.env_step(said[7:-1]).reward == 0.0
            seen.add("guess")
        else:
            seen.update(tool for tool in ("calculator", "python") if f'"{tool}"' in said)
            answer = str(sum(map(int, obs[8:-1].split(" + "))))
            asked = [{"role": "assistant", "content": said}]
            assert sums.teacher(f"{answer}\n\nNo calls are left.", rng, asked)[7:-1] == answer
            assert env.env_step(answer).reward == 1.0
    assert seen == {"guess", "calculator", "python"}


def test_the_larger_of_two_sums_is_right_and_the_other_is_not() -> None:
    larger = import_module("larger_sum")
    for seed in range(50):
        env = larger.LargerSum()
        obs, _ = env.env_reset(seed=seed)
        low, high = sorted(sum(map(int, s.split(" + "))) for s in obs.split(" or "))
        assert low < high
        assert env.env_step(str(high)).reward == 1.0
        assert env.env_step(str(low)).reward == 0.0
