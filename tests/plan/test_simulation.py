"""The simulation: laws that hold for any setup, and the closed form of the simplest."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.plan.simulation import simulate
from ludic.plan.workload import Lengths, Setup, Workload

FEW = settings(max_examples=25, deadline=None)


def setup(**changed: Any) -> Setup:
    work = Workload(
        episodes=changed.pop("episodes", 16),
        group=changed.pop("group", 4),
        lengths=changed.pop("lengths", Lengths(40, 100)),
        updates=changed.pop("updates", 4),
        prompt=20,
        turns=changed.pop("turns", 1),
        env_s=changed.pop("env_s", 0.0),
    )
    slots = changed.setdefault("slots", 16)
    usual: dict[str, Any] = {
        "servers": 2,
        "step_s": [0.001 + 1e-5 * rows for rows in range(slots + 1)],
        "cached_s": 1e-8,
        "prompt_s": 1e-6,
        "train_s": lambda tokens, longest: 1e-4 * tokens,
    }
    return Setup(workload=work, **usual | changed)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    slots = draw(st.integers(1, 20))
    return setup(
        servers=draw(st.integers(1, 5)),
        slots=slots,
        turns=draw(st.integers(1, 3)),
        env_s=draw(st.sampled_from([0.0, 0.05])),
        lag=draw(st.integers(0, 3)),
        ahead=draw(st.booleans()),
        in_order=draw(st.booleans()),
        shared=draw(st.booleans()),
        publish_s=draw(st.sampled_from([0.0, 0.1])),
        arrives_s=draw(st.sampled_from([0.0, 0.2])),
        request_s=draw(st.sampled_from([0.0, 0.001])),
        in_process=draw(st.booleans()),
        pause_s=draw(st.sampled_from([0.0, 0.05])),
        hosts=draw(st.integers(1, 3)),
        host_episode_s=draw(st.sampled_from([0.0, 0.002])),
        server_failures_per_hour=draw(st.sampled_from([0.0, 2000.0])),
        trainer_failures_per_hour=draw(st.sampled_from([0.0, 500.0])),
        restart_s=0.2,
        checkpoint_every=draw(st.integers(0, 2)),
        checkpoint_s=0.01,
        seed=draw(st.integers(0, 3)),
    )


@FEW
@given(setups())
def test_no_event_happens_before_its_cause_or_before_the_one_before_it(plan: Setup) -> None:
    trace = simulate(plan, traced=True).trace
    assert all(caused <= when for caused, when, _ in trace)
    assert all(a[1] <= b[1] for a, b in pairwise(trace))


@FEW
@given(setups())
def test_every_sampled_token_is_trained_on_waits_or_was_lost(plan: Setup) -> None:
    result = simulate(plan)
    assert result.sampled == result.trained + result.unused + result.lost
    assert result.trained > 0


@FEW
@given(setups())
def test_the_same_seed_gives_the_same_run(plan: Setup) -> None:
    assert simulate(plan) == simulate(plan)


@FEW
@given(setups())
def test_no_sample_in_order_is_older_than_the_bound(plan: Setup) -> None:
    result = simulate(replace(plan, in_order=True))
    assert result.lag_max <= plan.lag


@FEW
@given(
    episodes=st.integers(1, 20),
    length=st.integers(1, 200),
    step=st.floats(1e-4, 1e-2),
    cached=st.sampled_from([0.0, 1e-8, 1e-6]),
    host=st.sampled_from([0.0, 1e-3]),
    rest=st.floats(0.0, 1.0),
)
def test_one_of_everything_is_the_closed_form(
    episodes: int, length: int, step: float, cached: float, host: float, rest: float
) -> None:
    plan = setup(
        episodes=episodes,
        group=episodes,
        servers=1,
        slots=20,
        lengths=Lengths(length, length, spread=0.0),
        step_s=[step + 1e-5 * rows for rows in range(21)],
        cached_s=cached,
        host_episode_s=host,
        in_process=True,
        shared=True,
        publish_s=0.25,
        other_s=rest,
    )
    result = simulate(plan)
    prompts = 20 * 1e-6
    steps = length * (step + 1e-5 * episodes)
    steps += cached * (length * episodes * 20 + episodes * length * length / 2)
    waiting, passes = episodes * host + prompts + steps, 1e-4 * (episodes * length + 20)
    assert result.wait_s == pytest.approx(waiting, rel=1e-6)
    assert result.train_s == pytest.approx(passes, rel=1e-9)
    assert result.update_s == pytest.approx(waiting + passes + 0.25 + rest, rel=1e-6)
    assert (result.lag_max, result.trained, result.unused) == (0, 4 * episodes * length, 0)


def test_a_sampler_in_the_process_waits_while_its_host_works() -> None:
    equal = {"servers": 1, "lengths": Lengths(50, 50, spread=0.0), "host_episode_s": 0.01}
    beside, in_turns = (
        simulate(setup(in_process=in_process, **equal)).wait_s for in_process in (False, True)
    )
    assert in_turns > beside


def test_groups_that_teach_nothing_are_sampled_and_not_computed() -> None:
    plan = setup(lengths=Lengths(50, 50, spread=0.0))
    half = replace(plan, workload=replace(plan.workload, trained=0.5))
    assert simulate(half).train_s == pytest.approx(simulate(plan).train_s / 2)
    assert simulate(half).wait_s == pytest.approx(simulate(plan).wait_s)


def test_weights_that_arrive_later_hold_up_the_samples_that_need_them() -> None:
    plan = setup(lengths=Lengths(50, 50, spread=0.0), updates=6)
    late = simulate(replace(plan, arrives_s=0.5))
    assert late.update_s == pytest.approx(simulate(plan).update_s + 0.5)


def test_rows_beyond_a_servers_slots_wait_for_one() -> None:
    equal = Lengths(50, 50, spread=0.0)
    at_once, in_turns = (
        simulate(setup(servers=1, slots=slots, lengths=equal, cached_s=0.0, step_s=[0.001] * 17))
        for slots in (16, 8)
    )
    assert in_turns.wait_s == pytest.approx(2 * at_once.wait_s, rel=0.01)


def test_sampling_while_training_hides_the_shorter_of_the_two() -> None:
    plan = setup(lengths=Lengths(50, 50, spread=0.0), updates=12)
    in_turns, ahead = simulate(plan), simulate(replace(plan, lag=1, ahead=True))
    assert in_turns.update_s == pytest.approx(in_turns.wait_s + in_turns.train_s)
    assert ahead.update_s == pytest.approx(max(in_turns.wait_s, in_turns.train_s), rel=0.01)
    assert ahead.lag_max == 1


def test_a_device_that_is_shared_does_one_thing_at_a_time() -> None:
    plan = setup(servers=1, lengths=Lengths(50, 50, spread=0.0), updates=12)
    in_turns = simulate(plan)
    shared = simulate(replace(plan, lag=1, ahead=True, shared=True))
    assert shared.update_s == pytest.approx(in_turns.update_s, rel=0.02)


def test_servers_that_fail_cost_time_and_tokens() -> None:
    plan = setup(updates=10)
    failing = replace(plan, server_failures_per_hour=20_000.0, restart_s=0.05)
    result = simulate(failing)
    assert result.failures > 0
    assert result.lost > 0
    assert result.seconds > simulate(plan).seconds
