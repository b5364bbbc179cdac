"""From SAW items to micro-batches: sequences laid end to end, without padding.

Every rank holds the whole macro-batch and takes its share of one plan that all of them compute,
so the losses' normalisers are those of the macro-batch on any number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush, heapreplace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import BatchError
from ludic.saw.batch import make_batch
from ludic.saw.building import UNKNOWN_VERSION
from ludic.saw.items import BatchCounts, SAWBatch, SAWItem
from ludic.training.types import LossBatch, Scope

_log = logging.getLogger("ludic.training")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeptIds:
    """Which ids truncated sampling had kept, for all action tokens in one ragged array.

    Token i kept `ids[offsets[i]:offsets[i + 1]]`; an empty range means every id.
    """

    ids: Int[Tensor, " kept"]
    offsets: Int[Tensor, " tokens_plus_1"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences end to end, and the facts about their action tokens.

    `action_positions` are the places whose hidden state predicts an action token: one before it.
    """

    input_ids: Int[Tensor, " length"]
    position_ids: Int[Tensor, " length"]
    cu_seqlens: Int[Tensor, " sequences_plus_1"]
    lengths: tuple[int, ...]
    action_positions: Int[Tensor, " tokens"]
    target_ids: Int[Tensor, " tokens"]
    temperatures: Float[Tensor, " tokens"]
    loss: LossBatch
    kept: KeptIds | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        return _map_tensors(self, lambda t: t.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a sequence costs: its length, and attention that grows with the square of it."""

    quadratic: float = 0.0

    def __call__(self, length: int) -> float:
        return length + self.quadratic * length * length


@dataclass(frozen=True, slots=True, eq=False)
class PackedItem:
    """An item made ready: unmasked tokens only, and its action tokens' turns in batch numbers."""

    input_ids: NDArray[np.int64]
    actions: NDArray[np.int64]
    weights: NDArray[np.float32]
    turn_ids: NDArray[np.int64]
    rollout_id: int
    group_id: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A macro-batch with its turns, rollouts and groups numbered and measured."""

    items: tuple[SAWItem, ...]
    packed: tuple[PackedItem, ...]
    turn_lengths: NDArray[np.int64]
    rollout_lengths: NDArray[np.int64]
    group_lengths: NDArray[np.int64]
    counts: BatchCounts


def describe(item: SAWItem, index: int) -> str:
    """How errors name a sample."""
    turns = [span.turn_index for span in item.turns]
    return f"sample {index} (rollout {item.rollout_id!r}, turns {turns})"


def lay_out(batch: SAWBatch, *, max_seq_len: int | None = None) -> Layout:
    """Checks every item of the macro-batch and numbers what the losses count.

    Raises `BatchError` for a sample that cannot be trained on, and for a batch without
    samples. A sample longer than `max_seq_len` is an error, never cut.
    """
    items = make_batch(batch.items).items
    if not items:
        raise BatchError(
            "the batch has no samples to train on (dropped by filters: "
            f"{batch.meta.get('dropped', {})}); loosen the filters or sample more"
        )
    _check_logprobs(items)
    turns: dict[Hashable, int] = {}
    rollouts: dict[Hashable, int] = {}
    groups: dict[Hashable, int] = {}
    packed = []
    for index, item in enumerate(items):
        keep = np.asarray(item.attention_mask, dtype=bool)
        actions = np.asarray(item.action_mask, dtype=bool)
        _check_item(item, index, keep, actions, max_seq_len)
        group = item.group_id or ("rollout", item.rollout_id)
        own = [(item.rollout_id, span.turn_index) for span in item.turns]
        weights = item.attachments.token_weights
        if weights is None:
            weights = np.full(int(actions.sum()), item.weight, dtype=np.float32)
        packed.append(
            PackedItem(
                np.asarray(item.input_ids, dtype=np.int64)[keep],
                np.flatnonzero(actions[keep]),
                np.asarray(weights, dtype=np.float32),
                np.repeat(
                    [turns.setdefault(turn, len(turns)) for turn in own],
                    [span.end - span.start for span in item.turns],
                ),
                rollouts.setdefault(item.rollout_id, len(rollouts)),
                groups.setdefault(group, len(groups)),
            )
        )
    counts = [p.actions.size for p in packed]
    return Layout(
        items,
        tuple(packed),
        np.bincount(np.concatenate([p.turn_ids for p in packed])),
        np.bincount([p.rollout_id for p in packed], counts).astype(np.int64),
        np.bincount([p.group_id for p in packed], counts).astype(np.int64),
        batch.counts,
    )


def _check_item(
    item: SAWItem,
    index: int,
    keep: NDArray[np.bool_],
    actions: NDArray[np.bool_],
    max_seq_len: int | None,
) -> None:
    wrong = None
    if max_seq_len is not None and len(keep) > max_seq_len and int(keep.sum()) > max_seq_len:
        wrong = (
            f" has {int(keep.sum())} tokens, over max_seq_len={max_seq_len}: raise the "
            "setting, or drop such samples with the filter drop_overlong()"
        )
    elif (actions & ~keep).any():
        wrong = ": an action token is hidden by the attention mask"
    elif actions[keep.argmax()]:
        wrong = ": its first token is an action, which nothing predicts"
    elif not item.temperature > 0:
        wrong = f": temperature {item.temperature} is not a distribution to train on"
    if wrong is not None:
        raise BatchError(describe(item, index) + wrong)


def _check_logprobs(items: Sequence[SAWItem]) -> None:
    """Log-probs are there for all samples of the batch or for none, and finite, however the batch
    is packed."""
    for name in ("behavior_logprobs", "reference_logprobs", "teacher_logprobs"):
        found = [getattr(item.attachments, name) for item in items]
        if all(values is None for values in found):
            continue
        for index, (item, values) in enumerate(zip(items, found, strict=True)):
            if values is None:
                raise BatchError(
                    f"{describe(item, index)} has no {name}, while others of its batch do: "
                    "record them for all samples, or for none"
                )
            if not np.isfinite(values).all():
                at = int(np.argmin(np.isfinite(values)))
                raise BatchError(
                    f"{describe(item, index)}: {name} of action token {at} is {values[at]}, which "
                    "cannot be trained on: look at what reported it, or drop the sample"
                )


def plan_micro_batches(
    layout: Layout,
    *,
    micro_token_budget: int,
    scope: Scope = "token",
    cost: Cost | None = None,
    world_size: int = 1,
    packs: bool = True,
) -> list[list[tuple[int, ...]]]:
    """Which items share a micro-batch: for each rank, an equally long list of micro-batches.

    Items of one turn or rollout stay together where `scope` asks, in a separate micro-batch
    above the budget where they do not fit it: how calls fork is known only mid-run. The most
    expensive go first, each to the cheapest micro-batch that has room; the k-th micro-batches of
    the ranks, which run at the same time, are neighbours in cost. A rank without work gets an
    empty tuple. With `packs=False` every row, or turn or rollout, has its own micro-batch.
    """
    cost = cost or Cost()
    clusters = _clusters(layout, scope)
    sizes = [sum(layout.packed[i].input_ids.size for i in c) for c in clusters]
    for c, (members, size) in enumerate(zip(clusters, sizes, strict=True)):
        if packs and size <= micro_token_budget:
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
        if size > micro_token_budget or not packs:
            sizes[c] = micro_token_budget  # a separate micro-batch
    costs = [sum(cost(layout.packed[i].input_ids.size) for i in c) for c in clusters]
    order = sorted(range(len(clusters)), key=lambda c: (-costs[c], clusters[c]))
    total = -(-sum(sizes) // micro_token_budget)
    total = max(-(-total // world_size), 1) * world_size
    while (bins := _fill(order, sizes, costs, total, micro_token_budget)) is None:
        total += world_size
    loads = [sum(costs[c] for c in members) for members in bins]
    ranked = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    plan: list[list[tuple[int, ...]]] = [[] for _ in range(world_size)]
    for position, chosen in enumerate(ranked):
        turn, rank = divmod(position, world_size)
        # Every other round runs backwards, so that no rank always gets the dearest.
        rank = world_size - 1 - rank if turn % 2 else rank
        plan[rank].append(tuple(sorted(i for c in bins[chosen] for i in clusters[c])))
    return plan


def _fill(
    order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], total: int, budget: int
) -> list[list[int]] | None:
    """Spreads clusters over `total` bins by cost, or None where they do not fit the budget."""
    bins: list[list[int]] = [[] for _ in range(total)]
    used = [0] * total
    by_load = [(0.0, b) for b in range(total)]  # a heap
    for cluster in order:
        size, full = sizes[cluster], []
        while by_load and used[by_load[0][1]] + size > budget:
            full.append(heappop(by_load))
        if not by_load:
            return None
        load, best = by_load[0]
        bins[best].append(cluster)
        used[best] += size
        heapreplace(by_load, (load + costs[cluster], best))
        for bin_ in full:
            heappush(by_load, bin_)
    return bins


def _clusters(layout: Layout, scope: Scope) -> list[tuple[int, ...]]:
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


def pack(
    layout: Layout,
    indices: Sequence[int],
    *,
    proximal_logprobs: Sequence[NDArray[np.float32]] | None = None,
) -> MicroBatch:
    """Lays the items `indices`, at least one, end to end."""
    packed = [layout.packed[i] for i in indices]
    lengths = np.array([p.input_ids.size for p in packed], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counts = [p.actions.size for p in packed]
    actions = _joined([s + p.actions for s, p in zip(starts[:-1], packed, strict=True)], np.int64)
    input_ids = _joined([p.input_ids for p in packed], np.int64)
    local = [
        np.unique(_joined(ids, np.int64), return_inverse=True)
        for ids in (
            [p.turn_ids for p in packed],
            [np.full(c, p.rollout_id) for c, p in zip(counts, packed, strict=True)],
            [np.full(c, p.group_id) for c, p in zip(counts, packed, strict=True)],
        )
    ]
    items = [layout.items[i] for i in indices]

    def logprobs(name: str) -> Tensor | None:
        values = [getattr(item.attachments, name) for item in items]
        return None if values[0] is None else torch.from_numpy(_joined(values, np.float32))

    unknown = [np.full(c, UNKNOWN_VERSION) for c in counts]
    versions = [
        u if i.attachments.versions is None else i.attachments.versions
        for u, i in zip(unknown, items, strict=True)
    ]

    loss = LossBatch(
        weights=torch.from_numpy(_joined([p.weights for p in packed], np.float32)),
        turn_ids=torch.from_numpy(local[0][1]),
        rollout_ids=torch.from_numpy(local[1][1]),
        group_ids=torch.from_numpy(local[2][1]),
        turn_lengths=torch.from_numpy(layout.turn_lengths[local[0][0]]),
        rollout_lengths=torch.from_numpy(layout.rollout_lengths[local[1][0]]),
        group_lengths=torch.from_numpy(layout.group_lengths[local[2][0]]),
        counts=layout.counts,
        behavior_logprobs=logprobs("behavior_logprobs"),
        proximal_logprobs=None
        if proximal_logprobs is None
        else torch.from_numpy(_joined([proximal_logprobs[i] for i in indices], np.float32)),
        reference_logprobs=logprobs("reference_logprobs"),
        teacher_logprobs=logprobs("teacher_logprobs"),
        versions=torch.from_numpy(_joined(versions, np.int64)),
    )
    temperatures = [np.full(c, i.temperature) for c, i in zip(counts, items, strict=True)]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(_joined([np.arange(n) for n in lengths], np.int64)),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        lengths=tuple(lengths.tolist()),
        action_positions=torch.from_numpy(actions - 1),
        target_ids=torch.from_numpy(input_ids[actions]),
        temperatures=torch.from_numpy(_joined(temperatures, np.float32)),
        loss=loss,
        kept=_kept(layout, indices),
    )


def _kept(layout: Layout, indices: Sequence[int]) -> KeptIds | None:
    if all(layout.items[i].attachments.kept_token_ids is None for i in indices):
        return None
    rows: list[NDArray[np.int64]] = []
    for i in indices:
        packed, kept = layout.packed[i], layout.items[i].attachments.kept_token_ids
        if kept is None:
            kept = [np.zeros(0, dtype=np.int64)] * packed.actions.size
        for target, row in zip(packed.input_ids[packed.actions], kept, strict=True):
            if len(row) and target not in row:
                raise BatchError(
                    f"{describe(layout.items[i], i)}: token {target} was sampled, but is not "
                    "among the ids that truncated sampling kept; the record is inconsistent"
                )
        rows.extend(kept)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return KeptIds(torch.from_numpy(_joined(rows, np.int64)), torch.from_numpy(offsets))


def _joined(arrays: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.asarray(a, dtype=dtype) for a in arrays] or [np.zeros(0, dtype)])


def _map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """`value`, a dataclass, with `change` applied to every tensor in it."""
    updates: dict[str, Any] = {}
    for field in fields(value):  # type: ignore[arg-type]
        member = getattr(value, field.name)
        if isinstance(member, Tensor):
            updates[field.name] = change(member)
        elif isinstance(member, (LossBatch, KeptIds)):
            updates[field.name] = _map_tensors(member, change)
    return replace(value, **updates)  # type: ignore[type-var]
