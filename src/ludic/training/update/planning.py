"""Which rows share a micro-batch, and which rank computes it.

Every rank holds the whole macro-batch, computes the same plan, and takes its share of it. So the
losses' normalisers are those of the macro-batch on any number of ranks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np
from torch import nn

from ludic.errors import BatchError
from ludic.plumbing.model_parts import base_causal_lm, config_facts
from ludic.plumbing.records import Record
from ludic.saw.trainable import describe
from ludic.training.metrics.stats import Workload
from ludic.training.types import Scope
from ludic.training.update.packing import REPEATED, Layout

_log = logging.getLogger("ludic.training")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a sequence costs: its length, and attention that grows with the square of it."""

    quadratic: float = 0.0

    def __call__(self, length: int) -> float:
        return length + self.quadratic * length * length


def attention_cost(model: nn.Module) -> Cost:
    """How attention compares with the rest of the arithmetic, for balancing micro-batches."""
    causal = base_causal_lm(model)
    facts = config_facts(causal)
    layers, width = (facts.get(k) or 0 for k in ("num_hidden_layers", "hidden_size"))
    parameters = sum(p.numel() for p in causal.parameters())
    return Cost(layers * width / max(parameters, 1))


def plan_micro_batches(
    layout: Layout,
    *,
    micro_token_budget: int,
    scope: Scope = "token",
    cost: Cost | None = None,
    world_size: int = 1,
    longest_packed: int = sys.maxsize,
    shares: bool = False,
) -> list[list[tuple[int, ...]]]:
    """Which items share a micro-batch: for each rank, an equally long list of micro-batches.

    Items of one turn or rollout stay together where `scope` asks, in a separate micro-batch
    above the budget where they do not fit it: how calls fork is known only mid-run. The most
    expensive go first, each to the cheapest micro-batch that has room; the k-th micro-batches of
    the ranks, which run at the same time, are neighbours in cost. A rank without work gets an
    empty tuple. Rows above `longest_packed`, with their turn or rollout, have micro-batches of
    their own. With `shares`, rows that begin alike stay together as far as that does not make the
    ranks wait.
    """
    cost = cost or Cost()
    clusters = rows_together(layout, scope)
    units, separate = list[_Unit](), list[_Unit]()
    for members in clusters:
        packs = max(layout.order.lengths[i] for i in members) <= longest_packed
        work = workload(layout, members, cost, shares=shares and packs)
        size = work.size
        if packs and size <= micro_token_budget:
            units.append(_Unit(members, size, work.cost))
            continue
        name = describe(layout.items[members[0]], members[0])
        if size > micro_token_budget and len(members) == 1:
            raise BatchError(
                f"{name} has {size} tokens, over micro_token_budget={micro_token_budget}: raise it"
            )
        if len(members) > 1 and world_size > 1 and not packs:
            raise BatchError(
                f"{name}: the loss must see {len(members)} rows together (scope {scope!r}), but "
                "this model cannot pack rows, and ranks cannot run different numbers of them: "
                "train on one rank, or with a loss of scope 'token' such as GRPO's"
            )
        if size > micro_token_budget:
            _log.warning(
                "%s: %d rows with %d tokens, which the loss must see together (scope %r), share a "
                "micro-batch over micro_token_budget=%d",
                *(name, len(members), size, scope, micro_token_budget),
            )
        separate.append(_Unit(members, micro_token_budget, work.cost))  # room for no other
    arrangements = [units]
    if shares:
        links = list(_links(layout, units, cost))
        arrangements = [_bundled(links, micro_token_budget)]
        if world_size > 1:
            least = sum(unit.size + link.size for unit, link in links)
            mean = least / _micro_batches(least, micro_token_budget, world_size)
            arrangements += [_bundled(links, min(mean / n, micro_token_budget)) for n in _PARTS]
            arrangements.append(units)
    plans = (_spread([*each, *separate], micro_token_budget, world_size) for each in arrangements)
    found = min(plans, key=_duration)
    return [
        [tuple(sorted(i for unit in bin_ for i in unit.items)) for bin_ in rank] for rank in found
    ]


def workload(layout: Layout, members: Sequence[int], cost: Cost, *, shares: bool) -> Workload:
    """The work of one micro-batch."""
    size, spent, tokens, pairs = 0, 0.0, 0, 0
    for row, shared in layout.order.arrange(members, share=shares):
        length = layout.order.lengths[row]
        size += length - _saved(shared)
        spent += cost(length) - cost(shared)
        tokens += length - shared
        pairs += length**2 - shared**2
    return Workload(size, spent, tokens, pairs)


def _saved(shared: int) -> int:
    """What sharing so many tokens saves in the budget."""
    return shared - -(-shared // REPEATED)


class _Unit(Record, frozen=True):
    """Items that go to one micro-batch together."""

    items: tuple[int, ...]
    size: int
    cost: float


_Spread = list[list[list[_Unit]]]
"""The units of every micro-batch of every rank."""


def _spread(units: Sequence[_Unit], budget: int, world_size: int) -> _Spread:
    units = sorted(units, key=lambda unit: (-unit.cost, unit.items))
    total = _micro_batches(sum(unit.size for unit in units), budget, world_size)
    while (bins := _fill(units, total, budget)) is None:
        total += world_size
    ranked = sorted(bins, key=_load, reverse=True)
    plan: _Spread = [[] for _ in range(world_size)]
    for position, chosen in enumerate(ranked):
        turn, rank = divmod(position, world_size)
        # Every other round runs backwards, so that no rank always gets the dearest.
        plan[world_size - 1 - rank if turn % 2 else rank].append(chosen)
    return plan


def _micro_batches(size: int, budget: int, world_size: int) -> int:
    """How many it takes at least, the same number on every rank."""
    return max(-(-size // (budget * world_size)), 1) * world_size


def _load(bin_: Sequence[_Unit]) -> float:
    return sum(unit.cost for unit in bin_)


def _duration(plan: _Spread) -> float:
    """The cost that passes until all are done; the k-th micro-batches wait for each other."""
    return sum(max(map(_load, together)) for together in zip(*plan, strict=True))


_PARTS = (1, 2, 4, 8)
"""Rows that share tokens stay together up to the budget or, on several ranks, up to such a part of
a mean micro-batch: large ones repeat fewer tokens, small ones spread better."""


def _links(layout: Layout, units: Sequence[_Unit], cost: Cost) -> Iterator[tuple[_Unit, _Unit]]:
    """The units in the order of their first rows' tokens; with each, what it saves beside
    the one before it, at least, as a unit without items that is less than nothing."""
    order, before = layout.order, None
    rank = order.ranks.__getitem__
    firsts = [min(unit.items, key=rank) for unit in units]
    for at in sorted(range(len(units)), key=lambda at: order.ranks[firsts[at]]):
        row = firsts[at]
        shared = 0 if before is None else order.shared(before, row)
        yield units[at], _Unit((), -_saved(shared), -cost(shared))
        before = row


def _bundled(links: Sequence[tuple[_Unit, _Unit]], limit: float) -> list[_Unit]:
    """Neighbours that share tokens as one unit, up to a size."""
    runs: list[list[_Unit]] = []
    size = 0
    for unit, link in links:
        size += unit.size + link.size
        if runs and link.size and size <= limit:
            runs[-1] += [unit, link]
        else:
            runs.append([unit])
            size = unit.size
    return [
        _Unit(tuple(i for u in run for i in u.items), sum(u.size for u in run), _load(run))
        for run in runs
    ]


def _fill(units: Sequence[_Unit], total: int, budget: int) -> list[list[_Unit]] | None:
    """Spreads units over `total` bins by cost, or None where they do not fit the budget."""
    bins: list[list[_Unit]] = [[] for _ in range(total)]
    used = [0] * total
    by_load = [(0.0, b) for b in range(total)]  # a heap
    for unit in units:
        full = []
        while by_load and used[by_load[0][1]] + unit.size > budget:
            full.append(heappop(by_load))
        if not by_load:
            return None
        load, best = by_load[0]
        bins[best].append(unit)
        used[best] += unit.size
        heapreplace(by_load, (load + unit.cost, best))
        for bin_ in full:
            heappush(by_load, bin_)
    return bins


def rows_together(layout: Layout, scope: Scope) -> list[tuple[int, ...]]:
    """Items that must share a micro-batch, as connected components."""
    parent = list(range(len(layout.packed)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[int, int] = {}
    for i, item in enumerate(layout.packed):
        keys: list[int] = []
        if scope == "turn":
            keys = np.unique(item.turn_ids).tolist()
        elif scope == "rollout":
            keys = [item.rollout_id]
        for key in keys:
            parent[root(i)] = root(first.setdefault(key, i))
    members: dict[int, list[int]] = {}
    for i in range(len(layout.packed)):
        members.setdefault(root(i), []).append(i)
    return [tuple(m) for m in members.values()]
