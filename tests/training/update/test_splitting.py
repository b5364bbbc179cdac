"""How passes that do not fit are split, and what ranks agree on before."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ludic.inference.tiny import tiny_model
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWItem
from ludic.sharding.world import World
from ludic.training.update.packing import Layout, lay_out
from ludic.training.update.policy import Policy
from ludic.training.update.recovery import Recovery, halves

BUDGET = 64


def of_lengths(*lengths: int, rollouts: str = "abcdef") -> Layout:
    """Rows that begin with their number, of these rollouts."""
    items = []
    for number, (length, rollout) in enumerate(zip(lengths, rollouts, strict=False)):
        mask = np.array([0] * (length - 1) + [1], np.int8)
        ids = np.full(length, 3 + number)
        items.append(SAWItem(ids, np.ones(length, np.int8), mask, 1.0, rollout_id=rollout))
    return lay_out(make_batch(items))


def test_a_rank_first_asks_for_what_earlier_backward_passes_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recovery = Recovery(Policy(tiny_model()), World(device=torch.device("cuda")), BUDGET)
    recovery._sharded = True
    asked: list[int] = []

    def empty(size: int, **_: Any) -> None:
        asked.append(size)
        if size > 100:
            raise torch.OutOfMemoryError

    peaks = iter([150, 200, 200, 200, 200, 210])  # before each pass, and after it
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(peaks))
    assert recovery._has_room(40)
    for tokens in (40, 20, 100):  # 2.5 bytes for each; nothing that is new; 1.1
        assert recovery._measured(str, tokens)(tokens) == str(tokens)
    assert recovery._has_room(40)
    assert not recovery._has_room(42)
    assert asked == [0, 100, 105]


def test_a_pass_without_a_backward_pass_needs_no_room_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recovery = Recovery(Policy(tiny_model()), World(), BUDGET)
    monkeypatch.setattr(recovery, "_has_room", lambda _: False)
    (done,) = recovery.run(of_lengths(4, 4), ((0, 1), True), "token", len)
    assert done == (((0, 1), True), 2)


def test_a_rank_that_has_nothing_to_split_takes_part_in_the_others_halves_and_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = iter([(1.0, -30.0), (0.0, -math.inf), (0.0, -math.inf)])  # splits, and fits twice
    monkeypatch.setattr(World, "largest", lambda _, *own: [*map(max, own, next(others))])
    recovery = Recovery(Policy(tiny_model()), World(), BUDGET)
    passes = recovery.run(of_lengths(4), ((0,), True), "token", lambda part: part)
    assert [part for part, _ in passes] == [((0,), True), ((0,), False)]
    assert recovery.budget == 15


class Failing:
    """Has no memory at the given calls, counted from 1."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.count = calls, 0

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count in self.calls:
            raise torch.OutOfMemoryError


def test_a_small_pass_that_fails_takes_half_of_what_fitted_before() -> None:
    recovery = Recovery(Policy(tiny_model()), World(), BUDGET)
    layout, forward, budgets = of_lengths(20, 20, 4, 4), Failing(2, 5), list[int]()
    for items in ((0, 1), (2, 3), (2, 3)):
        assert list(recovery.run(layout, (items, True), "token", forward))
        budgets.append(recovery.budget)
    assert budgets == [BUDGET, 20, 10]


def test_passes_that_are_not_to_be_split_raise_what_went_wrong() -> None:
    recovery = Recovery(Policy(tiny_model()), World(), BUDGET, on=False)
    with pytest.raises(torch.OutOfMemoryError):
        list(recovery.run(of_lengths(4, 4), ((0, 1), True), "token", Failing(1)))


def test_halves_keep_together_what_the_loss_sees_together() -> None:
    layout = of_lengths(5, 6, 7, 8, 9, 4)
    first, second = halves(layout, (0, 2, 3, 5), "token")
    assert sorted((*first, *second)) == [0, 2, 3, 5]
    assert halves(layout, (3,), "token") == [(3,)]


def test_halves_are_cut_where_they_differ_least() -> None:
    assert halves(of_lengths(6, 2, 2, 6), range(4), "token") == [(0, 1), (2, 3)]
    assert halves(of_lengths(2, 2, 2, 10), range(4), "token") == [(0, 1, 2), (3,)]
    assert halves(of_lengths(10, 2, 2, 2), range(4), "token") == [(0,), (1, 2, 3)]
    assert halves(of_lengths(4, 4), range(2), "token") == [(0,), (1,)]
    together = of_lengths(4, 4, 4, 4, rollouts="abab")
    assert halves(together, range(4), "rollout") == [(0, 2), (1, 3)]
    assert halves(together, (1, 3), "rollout") == [(1, 3)]
    assert halves(together, (1, 3), "token") == [(1,), (3,)]


def test_ranks_agree_on_the_worst_verdict_and_the_smallest_size_that_is_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fits, splits, recomputes, _ = range(4)
    recovery = Recovery(Policy(tiny_model()), World(), BUDGET)
    for other, own, agreed in (
        ((fits, -math.inf), (fits, 40), (fits, 40)),
        ((fits, -math.inf), (splits, 40), (splits, 40)),
        ((splits, -30.0), (fits, 40), (splits, 30)),
        ((splits, -30.0), (splits, 40), (splits, 30)),
        ((splits, -50.0), (splits, 40), (splits, 40)),
        ((recomputes, -math.inf), (splits, 40), (recomputes, 40)),
    ):
        monkeypatch.setattr(
            World, "largest", lambda _, *mine, other=other: [*map(max, mine, other)]
        )
        assert recovery._agreed(*own) == agreed


def test_on_one_device_no_layer_is_watched() -> None:
    policy = Policy(tiny_model())
    Recovery(policy, World(), BUDGET)
    assert not any(module._forward_pre_hooks for module in policy.modules())
