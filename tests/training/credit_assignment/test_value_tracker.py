"""SPO's tracker, its credit, and the curriculum that samples by it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ludic.errors import CheckpointError, ConfigError, CreditError
from ludic.rollouts.requests import Curriculum, RolloutRequest
from ludic.runs.model import algorithm_of
from ludic.runs.settings import RunConfig
from ludic.training import (
    BetaTracker,
    DriftForgetting,
    TrackedAdvantage,
    UncertainTasks,
    make_algorithm,
    make_spo,
)
from ludic.types import EnvSpec, ProtocolSpec
from tests.oracles.rollouts import make_rollout

outcomes = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=6
)


@given(batches=st.lists(outcomes, max_size=4), rate=st.sampled_from([0.5, 0.9, 1.0]))
def test_the_tracker_follows_the_recursion_of_the_paper(
    batches: list[list[tuple[str, float]]], rate: float
) -> None:
    tracker = BetaTracker(rate, prior_value=0.5, prior_count=8.0)
    alpha, beta = dict.fromkeys("abc", 4.0), dict.fromkeys("abc", 4.0)
    for batch in batches:
        for task in {key for key, _ in batch}:
            rewards = [r for key, r in batch if key == task]
            alpha[task] = rate * alpha[task] + sum(rewards)
            beta[task] = rate * beta[task] + sum(1 - r for r in rewards)
        tracker.update(batch)
    for task in "abc":
        expected = alpha[task] / (alpha[task] + beta[task])
        assert tracker.value(task) == pytest.approx(expected)


@given(batch=outcomes)
def test_the_order_of_outcomes_in_a_batch_does_not_matter(batch: list[tuple[str, float]]) -> None:
    forwards, backwards = BetaTracker(), BetaTracker()
    forwards.update(batch)
    backwards.update(batch[::-1])
    assert all(forwards.value(t) == pytest.approx(backwards.value(t)) for t in "abc")


def test_forgetting_by_drift_is_said_as_a_table_as_in_a_run_file() -> None:
    config = RunConfig.model_validate(
        {
            "env": {"kind": "tic_tac_toe"},
            "algorithm": {"name": "spo", "kwargs": {"forgetting": {"half_life": 0.1}}},
        }
    )
    credit = algorithm_of(config).credit_assigner
    assert isinstance(credit, TrackedAdvantage)
    assert credit.tracker.forgetting == DriftForgetting(half_life=0.1)
    assert credit.watches_drift
    with pytest.raises(ConfigError, match=r"a table of half_life, lower, upper"):
        make_spo(forgetting={"half_live": 0.1})
    with pytest.raises(ConfigError, match="leave the tracker out"):
        make_spo(tracker=BetaTracker(), forgetting={})


def test_forgetting_by_drift_is_held_in_its_bounds() -> None:
    forgetting = DriftForgetting()
    assert forgetting.rate(0.0) == 0.96
    assert forgetting.rate(0.006) == pytest.approx(2 ** (-0.1))
    assert forgetting.rate(10.0) == 0.875


def test_drift_counts_from_when_the_task_was_last_seen() -> None:
    tracker = BetaTracker(DriftForgetting(half_life=0.06, lower=0.0, upper=1.0), prior_count=2.0)
    tracker.update([("a", 1.0)])  # no drift yet: alpha 1 + 1, beta 1
    tracker.observe_drift(0.06)
    tracker.update([("a", 1.0)])  # half is forgotten: alpha 1 + 1, beta 0.5
    assert tracker.value("a") == pytest.approx(2.0 / 2.5)
    tracker.update([("a", 0.0)])  # no drift since: alpha 2, beta 0.5 + 1
    assert tracker.value("a") == pytest.approx(2.0 / 3.5)


def test_advantages_are_against_the_value_from_before_the_batch_and_normalised() -> None:
    credit = TrackedAdvantage(BetaTracker(0.9, prior_value=0.5))
    rollouts = [
        make_rollout("a", [1.0], task="t"),
        make_rollout("b", [0.0, 1.0], task="t"),
        make_rollout("c", [0.0], task="u"),
    ]
    weights = credit.compute(rollouts)
    raw = [0.5, 0.5, -0.5]
    mean = sum(raw) / 3
    std = math.sqrt(sum((a - mean) ** 2 for a in raw) / 2)
    expected = [(a - mean) / (std + 1e-4) for a in raw]
    assert weights["a", 0] == pytest.approx(expected[0])
    assert weights["b", 0] == weights["b", 1] == pytest.approx(expected[1])
    assert weights["c", 0] == pytest.approx(expected[2])
    assert credit.tracker.value("t") > 0.5 > credit.tracker.value("u")


def test_each_task_is_measured_against_its_own_value() -> None:
    tracker = BetaTracker(1.0, prior_value=0.5, prior_count=1.0)
    tracker.update([("easy", 1.0), ("hard", 0.0)])
    assert (tracker.value("easy"), tracker.value("hard")) == (0.75, 0.25)
    rollouts = [make_rollout("a", [1.0], task="easy"), make_rollout("b", [1.0], task="hard")]
    credit = TrackedAdvantage(tracker, normalize=False).compute(rollouts)
    assert credit == {("a", 0): pytest.approx(0.25), ("b", 0): pytest.approx(0.75)}


def test_tasks_of_two_environments_are_two_whatever_they_are_called() -> None:
    tracker = BetaTracker(1.0, prior_value=0.5, prior_count=1.0)
    credit = TrackedAdvantage(tracker, normalize=False)
    right, wrong = (
        make_rollout(env, [reward], task="train#0").labelled(meta={"env": env})
        for env, reward in (("gsm8k", 1.0), ("math", 0.0))
    )
    credit.compute([right, wrong])
    assert credit.compute([right, wrong]) == {
        ("gsm8k", 0): pytest.approx(0.25),
        ("math", 0): pytest.approx(-0.25),
    }
    mix = {
        env: replace(request, meta={"env": env}, task_key="any")
        for env, request in (tasks("x") | tasks("y")).items()
    }
    credit.compute([make_rollout("a", [1.0], task="x").labelled(meta={"env": "x"})] * 50)
    chances = UncertainTasks(mix, tracker).probabilities()
    assert chances["x"] < chances["y"]


def test_each_seat_of_a_task_is_measured_against_its_own_value() -> None:
    tracker = BetaTracker(1.0, prior_value=0.5, prior_count=1.0)
    credit = TrackedAdvantage(tracker, normalize=False)
    game = [make_rollout(r, [v], task="t", agent=r) for r, v in (("X", 1.0), ("O", 0.0))]
    assert credit.compute(game) == {("X", 0): 0.5, ("O", 0): -0.5}
    again = {("X", 0): pytest.approx(0.25), ("O", 0): pytest.approx(-0.25)}
    assert credit.compute(game) == again, "the first player wins, which each learned of itself"
    assert tracker.value("t") == 0.5, "for the curriculum the task is as open as before"


def test_a_single_advantage_is_not_normalised() -> None:
    credit = TrackedAdvantage().compute([make_rollout("a", [1.0], task="t")])
    assert credit == {("a", 0): 0.5}


def test_two_advantages_are_normalised() -> None:
    rollouts = [make_rollout("a", [1.0], task="t"), make_rollout("b", [0.5], task="t")]
    weights = TrackedAdvantage().compute(rollouts)
    expected = 0.25 / (math.sqrt(2 * 0.25**2) + 1e-4)
    assert weights == {("a", 0): pytest.approx(expected), ("b", 0): pytest.approx(-expected)}


def test_an_update_that_moved_nothing_is_a_drift_of_zero() -> None:
    tracker = BetaTracker(DriftForgetting())
    tracker.observe_drift(0.0)
    assert tracker.state_dict()["drift"] == 0.0
    for bad in (-1e-9, math.inf):
        with pytest.raises(ConfigError, match="a KL is finite and >= 0"):
            tracker.observe_drift(bad)


def test_rounding_does_not_take_a_return_out_of_its_interval() -> None:
    for low, high in ((0.0, 1.0), (-1.0, 3.0)):
        for place, reward in ((1.0, high + 1e-12), (0.0, low - 1e-12)):
            credit = TrackedAdvantage(normalize=False, returns=(low, high))
            (weight,) = credit.compute([make_rollout("a", [reward], task="t")]).values()
            assert weight == place - 0.5
        for outside in (high + 1e-6, low - 1e-6):
            with pytest.raises(CreditError, match="outside"):
                TrackedAdvantage(returns=(low, high)).compute(
                    [make_rollout("a", [outside], task="t")]
                )


def test_the_bounds_of_a_tracker_belong_to_it() -> None:
    for value in (0.0, 1.0):
        assert BetaTracker(prior_value=value).value("t") == value
    BetaTracker(1.0)
    for rate in (1.1, -0.5, math.nan):
        with pytest.raises(ConfigError):
            BetaTracker(rate)
    DriftForgetting(lower=0.0, upper=1.0)
    DriftForgetting(lower=0.9, upper=0.9)
    with pytest.raises(CreditError, match=r"a reward of -0\.1"):
        BetaTracker().update([("t", -0.1)])
    assert BetaTracker().sampling_weights([]) == []
    assert BetaTracker().sampling_weights(["a", "b"]) == [0.5, 0.5]


def test_returns_are_mapped_from_their_interval_and_others_are_refused() -> None:
    plain, mapped = TrackedAdvantage(), TrackedAdvantage(returns=(-1.0, 3.0))
    places = {"a": 0.0, "b": 1.0, "c": 0.25}
    expected = plain.compute([make_rollout(k, [r], task="t") for k, r in places.items()])
    found = mapped.compute([make_rollout(k, [4 * r - 1], task="t") for k, r in places.items()])
    assert found == pytest.approx(expected)
    assert mapped.tracker.state_dict() == plain.tracker.state_dict()
    with pytest.raises(CreditError, match=r"'low' has a return of -1.5, outside \[-1, 3\]"):
        mapped.compute([make_rollout("low", [-1.5], task="t")])
    with pytest.raises(CreditError, match=r"-0.1, outside \[0, 1\].*algorithm.kwargs.returns"):
        plain.compute([make_rollout("slip", [-0.1], task="t")])
    tracked = make_algorithm("spo", returns=[-1, 3]).credit_assigner  # as a run file has it
    assert isinstance(tracked, TrackedAdvantage)
    assert tracked.returns == (-1, 3)


@pytest.mark.parametrize("returns", [(0.0,), (1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)])
def test_an_interval_that_is_none_is_refused(returns: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="returns="):
        make_spo(returns=returns)


def test_the_state_is_json_and_comes_back() -> None:
    tracker = BetaTracker(DriftForgetting())
    tracker.update([("a", 1.0), ("b", 0.25)])
    tracker.observe_drift(0.01)
    state = json.loads(json.dumps(tracker.state_dict()))
    other = BetaTracker(DriftForgetting())
    other.load_state_dict(state)
    for both in (tracker, other):
        both.update([("a", 0.0)])
    assert other.state_dict() == tracker.state_dict()
    with pytest.raises(CheckpointError, match="not the state of a BetaTracker"):
        other.load_state_dict({"tasks": {"a": [1.0]}})


def test_what_the_tracker_cannot_take_is_refused() -> None:
    with pytest.raises(CreditError, match=r"task 't': a reward of 2.0"):
        BetaTracker().update([("t", 2.0)])
    with pytest.raises(CreditError, match="has no task_key"):
        TrackedAdvantage().compute([make_rollout("a", [1.0])])
    with pytest.raises(ConfigError):
        BetaTracker(0.0)
    with pytest.raises(ConfigError):
        BetaTracker().observe_drift(math.nan)
    for bounds in ({"lower": 0.9, "upper": 0.8}, {"upper": 1.5}, {"lower": -0.1}):
        with pytest.raises(ConfigError, match="lower <= upper"):
            DriftForgetting(**bounds)
    for prior in ({"prior_value": 1.5}, {"prior_value": -0.5}, {"prior_count": 0.0}):
        with pytest.raises(ConfigError, match="prior_value in"):
            BetaTracker(**prior)  # type: ignore[arg-type]


def tasks(names: str) -> dict[str, RolloutRequest]:
    return {name: RolloutRequest(EnvSpec("env"), ProtocolSpec("single_agent")) for name in names}


def test_the_curriculum_draws_in_proportion_to_the_uncertainty() -> None:
    tracker = BetaTracker(1.0, prior_value=0.5, prior_count=1.0)
    tracker.update([("sure", 1.0)] * 99)
    curriculum = UncertainTasks(tasks("x") | {"sure": tasks("y")["y"]}, tracker, eps=0.01, seed=1)
    assert isinstance(curriculum, Curriculum)
    v = tracker.value("sure")
    unsure, sure = math.sqrt(0.25) + 0.01, math.sqrt(v * (1 - v)) + 0.01
    chances = curriculum.probabilities()
    assert chances == pytest.approx({"x": unsure / (unsure + sure), "sure": sure / (unsure + sure)})
    drawn = [request.task_key for request in curriculum.next_requests(2000)]
    spread = math.sqrt(2000 * chances["x"] * chances["sure"])
    assert abs(drawn.count("x") - 2000 * chances["x"]) < 5 * spread


def test_the_curriculum_goes_on_where_it_was() -> None:
    curriculum = UncertainTasks(tasks("abc"), BetaTracker(), seed=3)
    curriculum.next_requests(5)
    state = curriculum.state_dict()
    ahead = curriculum.next_requests(4)
    again = UncertainTasks(tasks("abc"), BetaTracker(), seed=3)
    again.load_state_dict(state)
    assert again.next_requests(4) == ahead
    assert len({request.sampling_seed for request in ahead}) == 4
    with pytest.raises(ConfigError):
        UncertainTasks({}, BetaTracker())
