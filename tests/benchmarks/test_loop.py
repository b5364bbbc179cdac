"""The parts of the loop's benchmark that figures depend on."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.loop import Stamps, busy_seconds, host_us
from benchmarks.sums import Sums


def test_time_in_which_two_kernels_ran_counts_once() -> None:
    events = [
        {"cat": "kernel", "ts": 0, "dur": 10},
        {"cat": "kernel", "ts": 5, "dur": 10},
        {"cat": "gpu_memcpy", "ts": 6, "dur": 1},
        {"cat": "kernel", "ts": 20, "dur": 5},
        {"cat": "cuda_runtime", "ts": 0, "dur": 100},
        {"cat": "kernel", "ts": 50},
    ]
    assert busy_seconds({"traceEvents": events}) == pytest.approx(20e-6)


def test_updates_before_the_first_line_that_counts_are_left_out() -> None:
    stamps = Stamps()
    stamps.marks = [(mark, 0.0) for mark in (10.0, 11.0, 13.0, 16.0)]
    assert stamps.between(0, 1) == [2.0, 3.0]


def test_the_sums_of_an_episode_depend_on_its_seed_alone_and_share_the_reward() -> None:
    env, again = Sums(turns=4), Sums(turns=4)
    (obs, _), (same, _) = env.env_reset(seed=3), again.env_reset(seed=3)
    rewards = []
    for turn in range(4):
        assert obs == same
        a, b = (int(word) for word in obs.split("?")[0].split() if word.isdigit())
        answer = f"{a + b}." if turn % 2 else "no"
        outcome, obs = env.env_step(answer), env.env_current_obs()
        again.env_step(answer)
        same = again.env_current_obs()
        rewards.append(outcome.reward)
        assert outcome.terminated == (turn == 3)
    assert rewards == [0, 0.25, 0, 0.25]


@pytest.mark.integration
@pytest.mark.parametrize("turns", [1, 4])
def test_the_hosts_cost_is_measured_in_a_run_that_answers_at_once(turns: int) -> None:
    args = Namespace(
        model="tiny", episodes=8, group=4, slots=8, max_tokens=8, host_updates=1, warmup=1
    )
    args.__dict__ |= {"precision": None, "overlap": False, "no_rollouts": False, "profile": None}
    args.workers = 0
    mean, lowest = host_us(args, turns)
    assert 0 < lowest <= mean
