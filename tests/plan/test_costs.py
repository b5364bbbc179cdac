"""What a model costs on a machine: laws, and the constants that a fit finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.memory.shape import Adapter
from ludic.plan.costs import Costs
from ludic.plan.profile import fit, load_profile, shape_named

FEW = settings(max_examples=30, deadline=None)
H200 = load_profile("h200")
SEVEN = shape_named("Qwen/Qwen2.5-7B-Instruct")


@FEW
@given(
    ranks=st.integers(1, 512),
    tokens=st.floats(1e4, 1e8),
    times=st.floats(1.0, 20.0),
    where=st.sampled_from(["link_gb_s", "network_gb_s"]),
)
def test_a_faster_link_is_never_slower(ranks: int, tokens: float, times: float, where: str) -> None:
    faster = H200.with_figures("assumed", "", **{where: times * H200[where]})
    slow, quick = (
        Costs(profile, SEVEN).update_s(tokens, 4096, budget=8192, context=2048, ranks=ranks)
        + Costs(profile, SEVEN).publish_s(ranks, 2 * ranks)
        + Costs(profile, SEVEN).decode_s(64, 1e5, 8)
        for profile in (H200, faster)
    )
    assert quick <= slow


def test_all_ranks_wait_for_the_longest_sequence_of_every_step() -> None:
    costs = Costs(H200, SEVEN)
    once, often = (
        costs.update_s(64_000, 28_000, budget=32_000, context=1000, ranks=64, steps=steps)
        for steps in (1, 16)
    )
    assert often > 10 * once


def test_a_small_pass_takes_as_long_as_its_kernels_start() -> None:
    costs = Costs(H200, shape_named("SmolLM2-135M"))
    few, more = (costs.pass_s(tokens, passes=1, context=64) for tokens in (10, 100))
    assert few == more == pytest.approx(30 * H200["pass_layer_s"])
    assert costs.pass_s(10**6, passes=1, context=64) > few


def test_the_host_launches_passes_that_no_graph_replays_and_adapters_more_of_them() -> None:
    whole, adapted = Costs(H200, SEVEN), Costs(H200, SEVEN, Adapter(16))
    launch, more = H200["pass_launch_s"], H200["pass_launch_adapter_s"]
    assert whole.started_s(2000) == pytest.approx(28 * launch)
    assert adapted.started_s(2000) == pytest.approx(28 * (launch + more))
    assert adapted.started_s(100) == pytest.approx(28 * H200["pass_layer_s"])
    small, large = (
        adapted.update_s(34_000, 400, budget=budget, context=400, together=2125)
        for budget in (4096, 34_000)
    )
    assert small == pytest.approx(16 * adapted.started_s(2125), rel=0.01)
    assert large < 0.7 * small


@FEW
@given(parameters=st.sampled_from(["Qwen2.5-1.5B", "Qwen2.5-7B"]), times=st.floats(1.0, 4.0))
def test_an_optimizer_on_the_host_moves_its_state_both_ways(parameters: str, times: float) -> None:
    shape = shape_named(parameters)
    slow, quick = (
        Costs(H200.with_figures("assumed", host_gb_s=gb), shape) for gb in (20.0, 20.0 * times)
    )
    assert slow.optimizer_s(on_host=True) == pytest.approx(12 * shape.parameters / 20e9)
    assert slow.optimizer_s(4, on_host=True) == pytest.approx(slow.optimizer_s(on_host=True) / 4)
    assert slow.optimizer_s() <= quick.optimizer_s(on_host=True) <= slow.optimizer_s(on_host=True)


@FEW
@given(rows=st.integers(1, 500), cached=st.floats(0, 1e6))
def test_more_rows_and_longer_ones_never_make_a_step_shorter(rows: int, cached: float) -> None:
    costs = Costs(H200, SEVEN)
    assert costs.decode_s(rows + 1, cached) >= costs.decode_s(rows, cached)
    longer = costs.decode_s(rows, cached + 1000) - costs.decode_s(rows, cached)
    assert longer == pytest.approx(1000 * costs.cached_token_s(), rel=1e-3)


def test_an_adapter_publishes_only_itself() -> None:
    whole, small = Costs(H200, SEVEN), Costs(H200, SEVEN, Adapter(16))
    assert whole.published_bytes == 2 * SEVEN.parameters
    assert small.published_bytes < whole.published_bytes / 50
    assert small.publish_s(4, 8) < whole.publish_s(4, 8)


def test_weights_that_are_gathered_beside_short_passes_take_the_time() -> None:
    slow = H200.with_figures("assumed", network_gb_s=1e-3)
    costs = Costs(slow, SEVEN)
    seconds = costs.update_s(16_000, 1000, budget=1000, context=1000, ranks=16)
    assert seconds == pytest.approx(costs.collective_s(16), rel=0.01)


@FEW
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=2))
def test_a_fit_finds_the_constants_that_made_the_times(constants: list[float]) -> None:
    first, second = constants
    rows = [
        ({"a": a, "b": b}, a * first + b * second) for a, b in ((1, 0.5), (2, 1), (1, 3), (0, 1))
    ]
    found = fit(rows)
    assert found == pytest.approx({"a": first, "b": second}, rel=1e-3)


def test_a_fit_finds_no_negative_constant_and_leaves_those_that_are_given() -> None:
    assert fit([({"a": 1.0, "b": 1.0}, 1.0), ({"a": 2.0, "b": 1.0}, 0.5)])["a"] == 0.0
    assert fit([({"a": 1.0, "b": 1.0}, 3.0)], {"a": 1.0}) == pytest.approx({"b": 2.0})
