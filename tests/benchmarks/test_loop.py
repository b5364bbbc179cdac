"""The parts of the loop's benchmark that figures depend on."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import gsm8k
from benchmarks.loop import host_us
from benchmarks.loop_meters import DecodeClock, Stamps, busy_spans
from benchmarks.sums import Sums
from ludic.training.algorithms.grpo import make_grpo


def test_time_in_which_two_kernels_ran_counts_once() -> None:
    events = [
        {"cat": "kernel", "ts": 0, "dur": 10},
        {"cat": "kernel", "ts": 5, "dur": 10},
        {"cat": "gpu_memcpy", "ts": 6, "dur": 1},
        {"cat": "kernel", "ts": 20, "dur": 5},
        {"cat": "cuda_runtime", "ts": 0, "dur": 100},
        {"cat": "kernel", "ts": 50},
    ]
    first, second = busy_spans({"traceEvents": events})
    assert first == pytest.approx((0.0, 15e-6))
    assert second == pytest.approx((20e-6, 25e-6))


def test_updates_before_the_first_line_that_counts_are_left_out() -> None:
    stamps = Stamps()
    stamps.marks = [(mark, 0.0) for mark in (10.0, 11.0, 13.0, 16.0)]
    assert stamps.between(0, 1) == [2.0, 3.0]


def test_only_decode_steps_between_two_log_lines_count() -> None:
    clock = DecodeClock()
    clock.times = [0.0, 1.0, 1.002, 1.004, 1.006, 9.0, 9.5]
    assert clock.median_ms(1.0, 9.0) == pytest.approx(2.0)
    assert clock.median_ms(20.0, 30.0) is None


def gsm8k_arguments(data: Path, *, shape: str | None) -> Namespace:
    left_out = ("episodes", "group", "max_tokens", "context", "learning_rate", "host_updates")
    args = Namespace(
        **dict.fromkeys(
            (*left_out, "slots", "precision", "lora", "optimizer_device", "micro_tokens")
        )
    )
    args.__dict__ |= {"model": "tiny", "device": "cpu", "data": data, "shape": shape}
    args.__dict__ |= {"workers": 0, "overlap": False, "no_rollouts": False, "recompute": False}
    gsm8k.settle(args)
    return args


def test_gsm8k_is_the_run_of_the_readme(tmp_path: Path) -> None:
    args = gsm8k_arguments(tmp_path, shape=None)
    config = gsm8k.run_of(args, updates=3)
    assert (args.episodes, args.max_tokens, args.learning_rate) == (128, 512, 1e-6)
    tables = gsm8k.readme_tables()
    assert config.training.rollouts_per_update == tables["training"]["rollouts_per_update"]
    assert config.slots == config.concurrency == 128  # the run's own choice
    assert config.protocol.kwargs == tables["protocol"]["kwargs"]
    assert make_grpo().group_size == args.group


def test_random_weights_answer_for_a_hash(tmp_path: Path) -> None:
    config = gsm8k.run_of(gsm8k_arguments(tmp_path, shape="7b"), updates=3)
    assert config.env[0].kind == "benchmarks.gsm8k:HashedGSM8K"
    assert config.inference.sampling.max_tokens == 256
    assert 0 <= gsm8k.hashed("a") < 1
    assert gsm8k.hashed("a") != gsm8k.hashed("b")


def test_trl_is_judged_as_ludic_judges(tmp_path: Path) -> None:
    row = {"question": "What is 9 + 9?", "answer": "It is 18.\n#### 18"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (asked,) = gsm8k.questions(tmp_path, 1, seed=0)
    assert asked["prompt"][1]["content"] == row["question"]

    def rewarded(text: str, *, whole: bool = True) -> float:
        return gsm8k.reward(tmp_path, asked["answer"], text, whole=whole)

    assert [rewarded("\\boxed{18}"), rewarded("\\boxed{17}"), rewarded("18")] == [1.0, 0.0, -0.1]
    assert rewarded("\\boxed{18}", whole=False) == -0.1


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
@pytest.mark.parametrize(("turns", "blocking"), [(1, True), (4, False)])
def test_the_hosts_cost_is_measured_in_a_run_that_answers_at_once(
    turns: int, blocking: bool
) -> None:
    args = Namespace(
        model="tiny", episodes=8, group=4, slots=8, max_tokens=8, host_updates=1, warmup=1
    )
    args.blocking = blocking
    args.__dict__ |= {"precision": None, "overlap": False, "no_rollouts": False, "profile": None}
    args.workers = 0
    mean, lowest = host_us(args, turns)
    assert 0 < lowest <= mean
