from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import BatchError, CreditError, NotTrainableError
from ludic.saw import (
    batch_from_rollouts,
    build_items,
    combine,
    count_items,
    drop_incomplete_completions,
    drop_overlong,
    drop_parse_errors,
    make_batch,
)
from ludic.training.credit_assignment import EpisodicReturn
from ludic.types import AgentStep, EnvironmentStep, FinishReason, Rollout, TokenTrace
from tests.saw.drawing import (
    batches,
    drawn_credit,
    facts_of_items,
    facts_of_rollouts,
    message,
)


def call(
    turn: int, prompt: tuple[int, ...], completion: tuple[int, ...], **more: object
) -> AgentStep:
    sampling = more.pop("sampling", {})
    trace = TokenTrace(prompt, completion, tuple(-0.5 for _ in completion))
    return AgentStep(turn, (), message(), FinishReason.STOP, trace, sampling=sampling)  # type: ignore[arg-type]


def outcome(turn: int, *calls: int, reward: float = 0.0) -> EnvironmentStep:
    return EnvironmentStep(turn, calls, "o", "a", "n", reward)


@given(batches(), st.integers(0, 99), st.booleans())
def test_items_hold_every_sampled_token_once_with_its_context_and_weight(
    batch: list[Rollout], seed: int, merge: bool
) -> None:
    credit = drawn_credit(batch, seed)
    items = build_items(batch, credit, merge=merge)
    assert facts_of_items(items) == facts_of_rollouts(batch, credit)


@given(batches(), st.integers(0, 99))
def test_merging_changes_no_token_and_no_count(batch: list[Rollout], seed: int) -> None:
    credit = drawn_credit(batch, seed)
    merged, unmerged = (build_items(batch, credit, merge=m) for m in (True, False))
    assert facts_of_items(merged) == facts_of_items(unmerged)
    assert make_batch(merged).counts == make_batch(unmerged).counts
    assert len(merged) <= len(unmerged)
    assert sum(len(i.input_ids) for i in merged) <= sum(len(i.input_ids) for i in unmerged)


@given(batches(), st.integers(0, 99), st.integers(1, 25))
def test_filtering_and_merging_do_not_depend_on_each_other(
    batch: list[Rollout], seed: int, longest: int
) -> None:
    credit = drawn_credit(batch, seed)
    judge = combine(drop_parse_errors(), drop_incomplete_completions(), drop_overlong(longest))
    results = []
    for merge in (True, False):
        drops: Counter[str] = Counter()
        items = build_items(batch, credit, merge=merge, sample_filter=judge, drops=drops)
        assert all(len(item.input_ids) <= longest for item in items)
        results.append((facts_of_items(items), drops))
    assert results[0] == results[1]


@given(batches(), st.integers(0, 99), st.integers(1, 25))
def test_every_turn_is_either_trained_on_or_counted(
    batch: list[Rollout], seed: int, longest: int
) -> None:
    credit = drawn_credit(batch, seed)
    for key in list(credit)[::3]:
        del credit[key]
    drops: Counter[str] = Counter()
    items = build_items(batch, credit, sample_filter=drop_overlong(longest), drops=drops)
    turns = sum(len({s.turn_index for s in r.agent_steps}) for r in batch)
    assert count_items(items).turns + drops.total() == turns


def test_the_calls_of_a_turn_become_one_sample_with_tool_results_as_state() -> None:
    steps = (call(0, (1, 2), (3, 4)), call(0, (1, 2, 3, 4, 9, 9), (5,)), outcome(0, 0, 1))
    [item] = build_items([Rollout("r", steps)], {("r", 0): 2.0}, merge=False)
    assert item.input_ids.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert item.action_mask.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert item.weight == 2.0
    assert item.attachments.token_weights is None
    assert [(s.start, s.end, s.turn_index, s.weight) for s in item.turns] == [(0, 3, 0, 2.0)]


def test_a_merged_item_has_a_weight_per_turn_and_none_of_its_own() -> None:
    steps = (
        call(0, (1, 2), (3,)),
        outcome(0, 0),
        call(1, (1, 2, 3, 7), (4, 5)),
        outcome(1, 2),
    )
    [item] = build_items([Rollout("r", steps)], {("r", 0): 1.0, ("r", 1): -2.0})
    assert math.isnan(item.weight)
    assert item.attachments.token_weights is not None
    assert item.attachments.token_weights.tolist() == [1.0, -2.0, -2.0]
    assert item.input_ids.tolist() == [1, 2, 3, 7, 4, 5]
    assert [(s.start, s.end, s.turn_index) for s in item.turns] == [(0, 1, 0), (1, 3, 1)]


def test_a_prompt_that_does_not_extend_forks_into_another_item() -> None:
    steps = (
        call(0, (1, 2), (3,)),
        outcome(0, 0),
        call(1, (1, 2, 8), (4,)),
        outcome(1, 2),
        call(2, (1, 2, 3, 6), (5,)),
        outcome(2, 4),
    )
    items = build_items([Rollout("r", steps)], {("r", t): float(t) for t in range(3)})
    # The third turn goes on from the first, although another one lies between them.
    assert [[s.turn_index for s in i.turns] for i in items] == [[0, 2], [1]]


def test_a_turn_that_forks_within_itself_counts_once() -> None:
    steps = (call(0, (1,), (2,)), call(0, (9,), (3,)), outcome(0, 0, 1))
    items = build_items([Rollout("r", steps)], {("r", 0): 1.0})
    assert len(items) == 2
    counts = make_batch(items).counts
    assert (counts.tokens, counts.turns, counts.rollouts, counts.groups) == (2, 1, 1, 1)


def test_calls_at_different_temperatures_are_not_merged() -> None:
    steps = (
        call(0, (1,), (2,), sampling={"temperature": 1.0}),
        outcome(0, 0),
        call(1, (1, 2, 3), (4,), sampling={"temperature": 0.5}),
        outcome(1, 2),
    )
    items = build_items([Rollout("r", steps)], {("r", 0): 1.0, ("r", 1): 1.0})
    assert [item.temperature for item in items] == [1.0, 0.5]


def test_turns_after_one_in_which_the_agent_only_heard_are_trained_on() -> None:
    rollout = Rollout("r", (outcome(0), call(1, (1,), (2,)), outcome(1, 1)))
    drops: Counter[str] = Counter()
    (item,) = build_items([rollout], {("r", 1): 1.0}, drops=drops)
    assert item.turns[0].turn_index == 1
    assert not drops


def test_two_rollouts_of_one_id_are_refused_and_one_given_twice_is_not() -> None:
    good, bad = (
        Rollout("call-0/0-0/agent", (call(0, (1,), (2,)), outcome(0, 0, reward=reward)))
        for reward in (1.0, -1.0)
    )
    with pytest.raises(BatchError, match=r"two rollouts have the id 'call-0/0-0/agent'"):
        batch_from_rollouts([good, bad], EpisodicReturn())
    twice = batch_from_rollouts([good, good.labelled()], EpisodicReturn())
    assert [item.weight for item in twice.items] == [1.0, 1.0]
    both = batch_from_rollouts([good, bad.labelled(id="other")], EpisodicReturn())
    assert [item.weight for item in both.items] == [1.0, -1.0]


def test_failed_rollouts_are_counted_and_not_trained_on() -> None:
    drops: Counter[str] = Counter()
    rollout = Rollout("r", (call(0, (1,), (2,)), outcome(0, 0)), error="the env raised")
    assert build_items([rollout], {("r", 0): 1.0}, drops=drops) == []
    assert drops == {"rollout_error": 1}


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_an_error_that_names_the_turn(weight: float) -> None:
    rollout = Rollout("r7", (call(0, (1,), (2,)), outcome(0, 0)))
    with pytest.raises(CreditError, match=r"'r7', turn 0: the weight is"):
        build_items([rollout], {("r7", 0): weight})


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temperature": 0.0}, "temperature 0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 5}, "top_k=5"),
    ],
)
def test_sampling_that_cannot_be_reproduced_is_refused(
    sampling: dict[str, float], says: str
) -> None:
    rollout = Rollout("r", (call(0, (1,), (2,), sampling=sampling), outcome(0, 0)))
    with pytest.raises(NotTrainableError, match=says):
        build_items([rollout], {("r", 0): 1.0})


def test_truncated_sampling_is_taken_where_the_kept_ids_are_recorded() -> None:
    trace = TokenTrace((1,), (2,), (-0.1,), kept_token_ids=((2, 3),))
    step = AgentStep(0, (), message(), FinishReason.STOP, trace, sampling={"top_p": 0.9})
    [item] = build_items([Rollout("r", (step, outcome(0, 0)))], {("r", 0): 1.0})
    assert item.attachments.kept_token_ids is not None
    assert item.attachments.kept_token_ids[0].tolist() == [2, 3]


def test_a_call_without_token_ids_is_refused() -> None:
    step = AgentStep(0, (), message(), FinishReason.STOP)
    with pytest.raises(NotTrainableError, match="no token ids"):
        build_items([Rollout("r", (step, outcome(0, 0)))], {("r", 0): 1.0})


def test_dtypes_are_those_of_the_contract() -> None:
    steps = (call(0, (1,), (2,)), outcome(0, 0), call(1, (1, 2, 3), (4,)), outcome(1, 2))
    [item] = build_items([Rollout("r", steps)], {("r", 0): 1.0, ("r", 1): 2.0})
    assert item.input_ids.dtype == np.int64
    assert item.action_mask.dtype == item.attention_mask.dtype == np.int8
    for values in (item.attachments.behavior_logprobs, item.attachments.token_weights):
        assert values is not None
        assert values.dtype == np.float32
