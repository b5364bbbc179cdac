"""Splits: what fits, what is the quickest, and what is written about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.errors import ConfigError, OutOfMemoryError
from ludic.memory.plan import Engine, Plan
from ludic.memory.update import Training
from ludic.plan.costs import Costs
from ludic.plan.profile import load_profile
from ludic.plan.report import chosen, cluster_lines, explained, gpu_hours, table
from ludic.plan.search import (
    Job,
    Split,
    best,
    host_episode_s,
    server_slots,
    splits,
    trainer_plan,
    try_split,
)
from ludic.plan.shapes import shape_named
from ludic.plan.workload import Lengths, Workload

FEW = settings(max_examples=15, deadline=None)


def job(name: str = "Qwen2.5-7B", gpu: str = "h200", **changed: Any) -> Job:
    shape = shape_named(name)
    profile = load_profile(gpu).with_figures("assumed", **changed.pop("figures", {}))
    training = Training(tokens=2048, precision="bfloat16")
    usual: dict[str, Any] = {
        "costs": Costs(profile, shape),
        "workload": Workload(64, 8, Lengths(200, 1024), 50),
        "memory": Plan(shape, training, Engine(64, 2048)),
        "longest": 2048,
        "slots": 64,
        "context": 2048,
    }
    return Job(**usual | changed)


@FEW
@given(
    memory=st.floats(20, 200),
    more=st.floats(0, 100),
    gpus=st.sampled_from([1, 2, 4, 8, 16, 64]),
    name=st.sampled_from(["Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-32B"]),
)
def test_more_memory_never_fits_less(memory: float, more: float, gpus: int, name: str) -> None:
    small = job(name, figures={"memory_gib": memory})
    large = job(name, figures={"memory_gib": memory + more})
    assert {s.ranks for s in splits(small, gpus)} <= {s.ranks for s in splits(large, gpus)}
    for ranks in (1, 2, 8):
        if trainer_plan(small, ranks, samples=False).fits(small.free):
            assert trainer_plan(large, ranks, samples=False).fits(large.free)
    assert server_slots(small, 1)[0] <= server_slots(large, 1)[0]


@FEW
@given(
    times=st.floats(1.0, 10.0),
    mode=st.sampled_from(["sync", "ahead", "async"]),
    where=st.sampled_from(["network_gb_s", "link_gb_s"]),
)
def test_a_faster_link_never_makes_an_update_longer(times: float, mode: Any, where: str) -> None:
    split, small = Split(16, 16), Workload(64, 8, Lengths(100, 100, spread=0.0), 4)
    seconds = [
        try_split(job(mode=mode, workload=small, figures={where: gb}), split, 4).result
        for gb in (5.0, 5.0 * times)
    ]
    assert seconds[1].update_s <= seconds[0].update_s * (1 + 1e-9)


def test_all_gpus_are_used_and_the_lines_say_so() -> None:
    plan = job(mode="async")
    option = best(plan, 16)
    split = option.split
    assert split.gpus == 16
    assert split.ranks % 8 == 0
    lines = cluster_lines(plan, option)
    assert lines.splitlines()[:3] == ["[cluster]", 'engine = "ray"', "trainer_nodes = 1"]
    assert f"servers = {split.servers}" in lines
    assert option.result.lag_max <= plan.lag
    assert 'engine = "local"' in cluster_lines(plan, best(plan, 4))


def test_what_does_not_fit_is_said_with_what_it_would_take() -> None:
    plan = job("Qwen2.5-32B", figures={"memory_gib": 20.0})
    with pytest.raises(OutOfMemoryError, match=r"no split of 2 .* GiB"):
        best(plan, 2)
    text = table(plan, {2: "it does not fit"})
    assert "memory" in text.splitlines()[1]
    assert text.endswith("it does not fit")
    assert chosen(plan, {2: "it does not fit"}, "cost") is None


def test_the_goal_chooses_between_time_and_money() -> None:
    plan = job("Qwen2.5-1.5B")
    options = {number: best(plan, number) for number in (1, 8)}
    cheap, soon = (chosen(plan, options, goal) for goal in ("cost", "updates"))
    assert cheap is not None
    assert soon is not None
    assert gpu_hours(cheap, 50) <= gpu_hours(soon, 50)
    assert soon.result.update_s <= cheap.result.update_s


def test_a_short_run_costs_more_than_nothing() -> None:
    plan = job("SmolLM2-135M", workload=Workload(64, 8, Lengths(20, 40), 1))
    row = table(plan, {1: best(plan, 1)}).splitlines()[1]
    hours = float(row.split()[-2])
    assert 0 < hours < 0.05


def test_actors_on_the_trainers_gpu_get_weights_and_take_turns() -> None:
    small = Workload(64, 8, Lengths(50, 50, spread=0.0), 8)
    one, two = (
        try_split(job(mode="async", workload=small, hosts=hosts), Split(1), 8).result
        for hosts in (1, 2)
    )
    assert one.publish_s > 0
    assert one.update_s > 0
    assert two.update_s > 0


def test_what_is_not_written_and_not_in_a_thread_is_not_paid_for() -> None:
    unwritten, threaded = job(writes=False), job(threaded=True)
    assert host_episode_s(unwritten) < host_episode_s(job()) < host_episode_s(threaded)


def test_more_machines_do_not_help_the_longest_answer() -> None:
    long = Workload(64, 8, Lengths(2000, 28_000, spread=1.2), 50)
    option = try_split(job(workload=long, longest=30_000, context=30_000), Split(32, 32), 3)
    assert option.limit == "stragglers"


def test_an_explanation_names_every_figure_once() -> None:
    profile = load_profile("h100")
    text = explained(profile, {"prompt": "150 (assumed)"})
    assert text.count("\n  ") == len(profile.figures) + 1
    assert "measured on another machine:" in text
    assert "prompt: 150 (assumed)" in text


@FEW
@given(mean=st.floats(1, 900), spread=st.floats(0, 1.5))
def test_drawn_lengths_have_the_mean_that_was_said(mean: float, spread: float) -> None:
    drawn = Lengths(mean, 1000, spread).draw(np.random.default_rng(0), 20_000)
    assert np.mean(drawn) == pytest.approx(mean, rel=0.1, abs=0.6)
    assert min(drawn) >= 1
    assert max(drawn) <= 1000


def test_a_mean_above_the_most_is_refused() -> None:
    with pytest.raises(ConfigError, match="impossible"):
        Lengths(200, 100)


def test_episodes_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        Workload(10, 4, Lengths(20, 100), 1)
