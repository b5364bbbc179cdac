"""How rows are spread over micro-batches and ranks: few micro-batches, and no rank waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from ludic.errors import BatchError
from ludic.inference.tiny import tiny_model
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWItem, TurnSpan
from ludic.training.update.packing import Layout, lay_out
from ludic.training.update.planning import Cost, attention_cost, plan_micro_batches, workload


def row(ids: Sequence[int], number: int = 0) -> SAWItem:
    mask = np.zeros(len(ids), np.int8)
    mask[-1] = 1
    return SAWItem(
        np.array(ids, np.int64), np.ones(len(ids), np.int8), mask, 1.0, rollout_id=f"r{number}"
    )


def of_lengths(*lengths: int) -> Layout:
    """Rows that share nothing."""
    rows = [row([10 * n + 3, *range(50, 49 + k)], n) for n, k in enumerate(lengths)]
    return lay_out(make_batch(rows))


def begun_alike(shared: int, own: Sequence[int]) -> Layout:
    start = list(range(3, 3 + shared))
    rows = [row([*start, *range(200 + 20 * n, 200 + 20 * n + k)], n) for n, k in enumerate(own)]
    return lay_out(make_batch(rows))


def lengths_of(layout: Layout, plan: list[list[tuple[int, ...]]]) -> list[list[list[int]]]:
    return [[[layout.order.lengths[i] for i in m] for m in rank] for rank in plan]


@pytest.mark.parametrize(
    ("budget", "world", "each"),
    [
        (40, 1, 1),
        (39, 1, 2),
        (20, 1, 2),
        (19, 1, 4),
        (40, 2, 1),
        (20, 2, 1),
        (19, 2, 2),
        (10, 4, 1),
    ],
)
def test_there_are_no_more_micro_batches_than_needed(budget: int, world: int, each: int) -> None:
    layout = of_lengths(10, 10, 10, 10)
    plan = plan_micro_batches(layout, micro_token_budget=budget, world_size=world)
    assert [len(rank) for rank in plan] == [each] * world


def test_rows_that_fill_micro_batches_to_the_last_token_need_no_more() -> None:
    layout = of_lengths(8, 8, 4, 4, 4, 4)
    (plan,) = plan_micro_batches(layout, micro_token_budget=16)
    assert sorted(sum(m) for m in lengths_of(layout, [plan])[0]) == [16, 16]


def test_no_rank_always_gets_the_longest_rows() -> None:
    layout = of_lengths(8, 7, 6, 5, 4, 3)
    plan = plan_micro_batches(layout, micro_token_budget=8, world_size=2, longest_packed=0)
    assert lengths_of(layout, plan) == [[[8], [5], [4]], [[7], [6], [3]]]
    plan = plan_micro_batches(layout, micro_token_budget=8, world_size=3, longest_packed=0)
    assert lengths_of(layout, plan) == [[[8], [3]], [[7], [4]], [[6], [5]]]


def test_long_rows_cost_more_than_their_tokens_where_attention_counts() -> None:
    layout = of_lengths(30, 10, 10, 10)
    by_tokens = plan_micro_batches(layout, micro_token_budget=60, world_size=2, cost=Cost())
    assert [sum(m[0]) for m in lengths_of(layout, by_tokens)] == [30, 30]
    layout = of_lengths(40, *[10] * 8)
    squared = plan_micro_batches(layout, micro_token_budget=120, world_size=2, cost=Cost(1.0))
    assert lengths_of(layout, squared) == [[[40]], [[10] * 8]]
    plain = plan_micro_batches(layout, micro_token_budget=120, world_size=2)
    assert [sum(m[0]) for m in lengths_of(layout, plain)] == [60, 60]


def test_the_work_of_rows_counts_what_they_share_once() -> None:
    layout, cost = begun_alike(16, [4, 4]), Cost(0.5)
    whole = workload(layout, (0, 1), cost, shares=False)
    assert (whole.size, whole.cost, whole.tokens, whole.pairs) == (40, 440, 40, 800)
    shared = workload(layout, (0, 1), cost, shares=True)
    assert shared.tokens == 16 + 4 + 4
    assert shared.size == 20 + 4 + 2  # an eighth of what is shared counts again
    assert shared.pairs == 400 + 400 - 256
    assert shared.cost == 220 + 220 - (16 + 0.5 * 256)
    odd = begun_alike(17, [4, 4])
    assert workload(odd, (0, 1), cost, shares=True).size == 21 + 4 + 3


def test_what_rows_share_makes_room_only_where_they_may_share_it() -> None:
    layout = begun_alike(16, [4, 4, 4, 4])
    size = workload(layout, range(4), Cost(), shares=True).size
    for shares, longest, micro_batches in ((True, 999, 1), (False, 999, 4), (True, 0, 4)):
        (plan,) = plan_micro_batches(
            layout, micro_token_budget=size, longest_packed=longest, shares=shares
        )
        assert len(plan) == micro_batches
    (plan,) = plan_micro_batches(layout, micro_token_budget=size)
    assert len(plan) == 4
    (plan,) = plan_micro_batches(layout, micro_token_budget=size - 1, shares=True)
    assert len(plan) == 2


def test_rows_over_the_budget_are_told_from_rows_that_just_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = of_lengths(12, 12)
    plan_micro_batches(layout, micro_token_budget=12)
    with pytest.raises(BatchError, match="has 12 tokens, over micro_token_budget=11"):
        plan_micro_batches(layout, micro_token_budget=11)
    forked = lay_out(make_batch([replace(i, rollout_id="r") for i in layout.items]))
    for world in (1, 2):
        plan = plan_micro_batches(forked, micro_token_budget=24, scope="rollout", world_size=world)
        assert [m for rank in plan for m in rank if m] == [(0, 1)]
    plan_micro_batches(forked, micro_token_budget=24, scope="rollout", longest_packed=0)
    assert caplog.messages == []
    for world in (1, 2):
        caplog.clear()
        plan = plan_micro_batches(forked, micro_token_budget=23, scope="rollout", world_size=world)
        assert [m for rank in plan for m in rank if m] == [(0, 1)]
        (said,) = caplog.messages
        assert "2 rows with 24 tokens" in said


def test_a_turn_over_the_budget_shares_its_micro_batch_with_nothing_else() -> None:
    items = [*of_lengths(12, 12).items, row([1, 2, 3], 7)]
    forked = [replace(i, rollout_id="r") for i in items[:2]]
    layout = lay_out(make_batch([*forked, items[2]]))
    (plan,) = plan_micro_batches(layout, micro_token_budget=20, scope="rollout")
    assert sorted(plan) == [(0, 1), (2,)]


def test_rows_linked_through_others_stay_together() -> None:
    def of(turns: Sequence[int], number: int) -> SAWItem:
        item = row(range(number * 10 + 3, number * 10 + 9), number)
        mask = np.array([0] * (6 - len(turns)) + [1] * len(turns), np.int8)
        spans = tuple(TurnSpan(n, n + 1, turn, 1.0) for n, turn in enumerate(turns))
        return replace(item, rollout_id="r", action_mask=mask, turns=spans)

    layout = lay_out(make_batch([of([0], 0), of([2], 1), of([0, 1], 2), of([1, 2], 3), of([5], 4)]))
    (plan,) = plan_micro_batches(layout, micro_token_budget=24, scope="turn")
    assert sorted(plan) == [(0, 1, 2, 3), (4,)]
    (plan,) = plan_micro_batches(layout, micro_token_budget=30, scope="token")
    assert sorted(plan) == [(0, 1, 2, 3, 4)]
    (plan,) = plan_micro_batches(layout, micro_token_budget=6, scope="token")
    assert sorted(plan) == [(0,), (1,), (2,), (3,), (4,)]


def duration(layout: Layout, plan: list[list[tuple[int, ...]]], *, shares: bool) -> float:
    """What passes until all ranks are done, if the k-th micro-batches wait for each other."""
    return sum(
        max(workload(layout, m, Cost(0.01), shares=shares).cost for m in together)
        for together in zip(*plan, strict=True)
    )


@given(
    groups=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    prompt=st.integers(1, 60),
    own=st.integers(1, 30),
    budget=st.integers(100, 600),
    world=st.integers(1, 5),
)
def test_sharing_never_takes_longer_than_computing_every_row_whole(
    groups: list[int], prompt: int, own: int, budget: int, world: int
) -> None:
    rows = [
        row([1000 * group + 3, *range(50, 49 + prompt), *range(100 * n, 100 * n + own)], 9 * group)
        for group, members in enumerate(groups)
        for n in range(1, members + 1)
    ]
    layout = lay_out(make_batch(rows))
    with_sharing, without = (
        plan_micro_batches(
            layout, micro_token_budget=budget, world_size=world, cost=Cost(0.01), shares=shares
        )
        for shares in (True, False)
    )
    whole = duration(layout, without, shares=False)
    assert duration(layout, with_sharing, shares=True) <= whole * (1 + 1e-9)


def test_a_group_is_spread_over_ranks_in_parts_that_still_share() -> None:
    """Eight rows that are mostly prompt, two groups of them: two ranks take a group each."""
    first, second = ([start, *range(50, 113)] for start in (3, 4))
    rows = [
        row([*start, *range(200 + 10 * n, 204 + 10 * n)], n)
        for n, start in enumerate([first, second] * 8)
    ]
    layout = lay_out(make_batch(rows))
    plan = plan_micro_batches(layout, micro_token_budget=2000, world_size=2, shares=True)
    assert sorted(sorted(m) for rank in plan for m in rank) == [
        list(range(0, 16, 2)),
        list(range(1, 16, 2)),
    ]
    plan = plan_micro_batches(layout, micro_token_budget=2000, shares=True)
    assert plan == [[tuple(range(16))]]


def test_one_group_is_split_for_two_ranks_into_neighbours_that_share() -> None:
    layout = begun_alike(16, [16] * 8)
    plan = plan_micro_batches(layout, micro_token_budget=2000, world_size=2, shares=True)
    assert plan == [[(0, 1, 2, 6, 7)], [(3, 4, 5)]]  # three rows are what a mean part has room for
    plan = plan_micro_batches(layout, micro_token_budget=52, world_size=2, shares=True)
    assert plan == [[(0, 1), (6, 7)], [(2, 3), (4, 5)]]


def test_parts_of_a_group_that_are_smaller_than_a_ranks_share_spread_evenly() -> None:
    layout = begun_alike(16, [16] * 24)
    plan = plan_micro_batches(layout, micro_token_budget=4000, world_size=4, shares=True)
    work = [workload(layout, m, Cost(), shares=True) for (m,) in plan]
    assert [each.tokens for each in work] == [16 + 6 * 16] * 4  # what is shared once on each rank


def test_rows_as_long_as_the_longest_that_are_packed_are_packed() -> None:
    layout = of_lengths(10, 10)
    for longest, micro_batches in ((10, 1), (9, 2)):
        (plan,) = plan_micro_batches(layout, micro_token_budget=40, longest_packed=longest)
        assert len(plan) == micro_batches


def test_rows_that_must_stay_together_are_measured_by_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    single, *pair = of_lengths(12, 12, 12).items
    pair = [replace(i, rollout_id="r") for i in pair]
    for items in ([single, *pair], [*pair, single]):
        caplog.clear()
        layout = lay_out(make_batch(items))
        (plan,) = plan_micro_batches(layout, micro_token_budget=23, scope="rollout")
        assert len(plan) == 2
        (said,) = caplog.messages
        assert "2 rows with 24 tokens" in said


@pytest.mark.parametrize(("shares", "longest"), [(False, 99), (True, 0), (True, 19)])
def test_rows_that_may_not_share_are_measured_whole(
    shares: bool, longest: int, caplog: pytest.LogCaptureFixture
) -> None:
    items = [replace(i, rollout_id="r") for i in begun_alike(16, [4, 4]).items]
    layout = lay_out(make_batch(items))
    for budget, messages in ((40, 0), (39, 1)):
        caplog.clear()
        plan_micro_batches(
            layout,
            micro_token_budget=budget,
            scope="rollout",
            longest_packed=longest,
            shares=shares,
        )
        assert len(caplog.messages) == messages


def test_rows_of_one_rollout_that_cannot_be_packed_need_a_single_rank() -> None:
    items = [replace(i, rollout_id="r") for i in of_lengths(12, 12).items]
    layout = lay_out(make_batch(items))
    (plan,) = plan_micro_batches(layout, micro_token_budget=24, scope="rollout", longest_packed=0)
    assert plan == [(0, 1)]
    with pytest.raises(BatchError, match=r"must see 2 rows together .* train on one rank"):
        plan_micro_batches(
            layout, micro_token_budget=24, scope="rollout", longest_packed=0, world_size=2
        )


def test_attention_costs_as_much_as_the_model_is_narrow() -> None:
    model = tiny_model(layers=3)
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    assert attention_cost(model) == Cost(3 * config.hidden_size / parameters)
    assert attention_cost(nn.Linear(2, 3)) == Cost(0.0)
    assert Cost(0.5)(4) == 4 + 0.5 * 16
