"""Splits: what fits, what is the quickest, and what is written about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.errors import ConfigError, OutOfMemoryError
from ludic.memory.plan import GIB, Engine, Plan
from ludic.memory.update import Training
from ludic.plan.costs import Costs, passes_of
from ludic.plan.profile import load_profile, shape_named
from ludic.plan.report import chosen, cluster_lines, explained, gpu_hours, table
from ludic.plan.search import (
    Job,
    Split,
    best,
    host_episode_s,
    server_slots,
    setup_of,
    splits,
    taken_bytes,
    trainer_plan,
    try_split,
)
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
    plans = [job(mode="async", workload=small, hosts=hosts) for hosts in (1, 2)]
    costs = plans[0].costs
    one, two = (setup_of(plan, Split(1), 8)[0] for plan in plans)
    # The trainer waits for its copy of the weights; actors have them once the file is there.
    copied, arrives = costs.handed_over_s()
    assert (one.publish_s, one.arrives_s) == (copied, arrives) == (two.publish_s, two.arrives_s)
    assert copied == pytest.approx(2 * costs.shape.parameters * costs.profile["copy_byte_s"])
    # Two engines have half of the rows each, and one of them computes at a time.
    assert one.step_s[64] == costs.decode_s(64)
    assert two.step_s[64] == 2 * costs.decode_s(32) > one.step_s[64]
    results = [try_split(plan, Split(1), 8).result for plan in plans]
    assert [result.publish_s for result in results] == [copied, copied]
    assert results[0].update_s >= results[0].train_s + copied
    # What one host did for all episodes two now do at the same time, but steps take longer.
    quick = [
        try_split(replace(plan, costs=with_free_steps(plan.costs)), Split(1), 8).result.update_s
        for plan in plans
    ]
    assert quick[1] < quick[0]


def with_free_steps(costs: Costs) -> Costs:
    """The same on a machine whose decode steps take no time."""
    names = (name for name in costs.profile.figures if name.startswith("decode_"))
    free = costs.profile.with_figures("assumed", "", **dict.fromkeys(names, 0.0))
    return replace(costs, profile=free)


def test_a_run_is_expected_to_take_less_than_the_most_that_it_may() -> None:
    plan = job("Qwen2.5-1.5B", slots=64)
    option = try_split(plan, Split(1), 2)
    assert option.taken < option.trainer.total
    line = table(plan, {1: option}).splitlines()[1]
    assert f"{option.taken / GIB:.1f} to {option.trainer.total / GIB:.1f} of 139" in line


def test_passes_hold_whole_groups_and_memory_follows_them() -> None:
    # Groups of 8 x 256 + 128 tokens: one fits into a pass of 4,096 tokens, three into one of 7,936.
    work = Workload(128, 8, Lengths(256, 256, spread=0.0), 4, prompt=128)
    plan = job("Qwen2.5-1.5B", workload=work, longest=1024)
    taken = []
    for budget in (4096, 7936):
        how = trainer_plan(replace(plan, budget=budget), 1, samples=True)
        taken.append(taken_bytes(plan, how, 1))
    one, three = (parts["activations: MLP"] for parts in taken)
    assert three == pytest.approx(3 * one, rel=0.01)
    assert passes_of(work.trained_tokens, 4096, work.group_tokens) == 16
    assert passes_of(work.trained_tokens, 7936, work.group_tokens) == 6
    assert passes_of(work.trained_tokens, 4096) == 9


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
