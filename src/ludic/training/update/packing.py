"""Prepares a macro-batch, and packs its micro-batches: sequences end to end, without padding.

`lay_out` checks every item, numbers it, and measures what the losses count; `pack` makes a
micro-batch of some of the items.

Rows may begin with the same tokens, which are then computed once. Rows are sorted by their tokens,
so rows that begin alike are neighbours: a row shares its beginning with the row before it, and only
the rest is computed, as queries that see the keys of the shared tokens and their own. A hidden
state depends only on the tokens up to it, so values and gradients are those of rows computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import BatchError
from ludic.plumbing.records import Record
from ludic.saw.batch import bounds, completed, group_key, ranges
from ludic.saw.items import UNKNOWN_VERSION, BatchCounts, SAWBatch, SAWItem
from ludic.saw.trainable import check_logprobs, describe, visible_tokens
from ludic.training.types import LossBatch

LEAST = 8
"""A row shares at least one in so many of its tokens, or none: below, gathering keys costs as much
as it saves."""
REPEATED = 8
"""So many shared tokens count as one in the budget: a layer holds a token's key and value again for
every row that has it, less than an eighth of what it holds of a token that it computes."""


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """What each sequence of a packed row attends to, where some share their beginning: the places
    of all its tokens in the packed row, sequences end to end."""

    places: Int[Tensor, " keys"]
    cu_seqlens: Int[Tensor, " sequences_plus_1"]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RowOrder:
    """Rows in the order of their tokens. Row i is at `ranks[i]`; the row at k begins with
    `common[k]` tokens of the row at k - 1."""

    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    common: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[NDArray[np.int64]]) -> RowOrder:
        """Sorts the rows."""
        keys = [row.astype(">u4").tobytes() for row in rows]  # compare like the ids themselves
        order = sorted(range(len(rows)), key=keys.__getitem__)
        ranks = sorted(range(len(rows)), key=order.__getitem__)
        common = (0, *(_in_common(rows[a], rows[b]) for a, b in pairwise(order)))
        return cls(tuple([row.size for row in rows]), tuple(ranks), common)

    def shared(self, before: int, row: int) -> int:
        """How many tokens `row` shares with `before`, a row in front of it: 0 for too few."""
        found = min(self.common[self.ranks[before] + 1 : self.ranks[row] + 1])
        return found if LEAST * found >= self.lengths[row] else 0

    def arrange(self, members: Sequence[int], *, share: bool = True) -> list[tuple[int, int]]:
        """The order in which `members` are laid end to end, each with the number of tokens that it
        shares with the one before it. Rows that share nothing stay in the order given."""
        if share and len(members) > 1:
            rows = sorted(members, key=self.ranks.__getitem__)
            shared = [0, *(self.shared(a, b) for a, b in pairwise(rows))]
            if any(shared):
                return list(zip(rows, shared, strict=True))
        return [(row, 0) for row in members]


def _in_common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many tokens both rows begin with."""
    shorter = min(a.size, b.size)
    differs = (a[:shorter] != b[:shorter]).nonzero()[0]
    return int(differs[0]) if differs.size else shorter


def gather(
    values: Float[Tensor, "length ..."], places: Int[Tensor, " places"]
) -> Float[Tensor, "places ..."]:
    """`values` at `places`, any of them any number of times. The gradients of one place are added
    up in float32 at least: many in a narrow type would be rounded as often."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return values.to(wide).index_select(0, places).to(values.dtype)


class PackedItem(Record, frozen=True, eq=False):
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
    order: RowOrder
    turn_lengths: NDArray[np.int64]
    rollout_lengths: NDArray[np.int64]
    group_lengths: NDArray[np.int64]
    counts: BatchCounts


def lay_out(batch: SAWBatch, *, max_seq_len: int | None = None) -> Layout:
    """Checks every item of the macro-batch and numbers what the losses count.

    Raises `BatchError` for a sample that cannot be trained on, and for a batch without
    samples. A sample longer than `max_seq_len` is an error, never cut.
    """
    items = completed(batch.items)
    if not items:
        raise BatchError(
            "the batch has no samples to train on (dropped by filters: "
            f"{batch.meta.get('dropped', {})}); loosen the filters or sample more"
        )
    check_logprobs(items)
    rollout_ids = _numbered(item.rollout_id for item in items)
    group_ids = _numbered(map(group_key, items))
    # Of all items at once: an array of few tokens costs much more to make than to fill.
    counts = [item.turns[-1].end for item in items]
    spans = [(item.rollout_id, span) for item in items for span in item.turns]
    turn_ids = np.repeat(
        _numbered((rollout, span.turn_index) for rollout, span in spans),
        [span.end - span.start for _, span in spans],
    )
    weights = np.repeat(np.array([item.weight for item in items], dtype=np.float32), counts)
    packed = []
    rows, places = _rows(items, max_seq_len), pairwise(bounds(counts))
    for i, ((ids, actions), (start, end)) in enumerate(zip(rows, places, strict=True)):
        own = items[i].attachments.token_weights
        own = weights[start:end] if own is None else np.asarray(own, dtype=np.float32)
        turns = turn_ids[start:end]
        packed.append(PackedItem(ids, actions, own, turns, rollout_ids[i], group_ids[i]))
    layout = Layout(
        items,
        tuple(packed),
        RowOrder.of([p.input_ids for p in packed]),
        np.bincount(turn_ids),
        np.bincount(rollout_ids, counts).astype(np.int64),
        np.bincount(group_ids, counts).astype(np.int64),
        batch.counts,
    )
    lengths = (layout.turn_lengths, layout.rollout_lengths, layout.group_lengths)
    if (found := BatchCounts(sum(counts), *map(len, lengths))) != batch.counts:
        raise BatchError(
            f"the batch says {batch.counts}, by which losses are divided, and its items are "
            f"{found}: make a batch of other items with make_batch(items, batch.meta)"
        )
    return layout


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """The number of each key, counted from 0 in the order in which they first come."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _rows(
    items: Sequence[SAWItem], max_seq_len: int | None
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The tokens of each item that the attention mask shows, and where its actions are."""
    lengths = [len(item.input_ids) for item in items]
    if (
        (max_seq_len is not None and max(lengths) > max_seq_len)
        or not np.concatenate([item.attention_mask for item in items]).all()
        or not all(item.temperature > 0 for item in items)
    ):  # tokens to leave out, or something wrong
        found = (visible_tokens(item, index, max_seq_len) for index, item in enumerate(items))
        return [(ids, actions.nonzero()[0]) for ids, actions in found]
    ids = np.concatenate([item.input_ids for item in items], dtype=np.int64, casting="unsafe")
    counts, starts = [item.turns[-1].end for item in items], bounds(lengths)
    actions = np.concatenate([item.action_mask for item in items]).nonzero()[0]
    actions -= np.repeat(starts[:-1], counts)
    return [
        (ids[a:b], actions[c:d])
        for (a, b), (c, d) in zip(pairwise(starts), pairwise(bounds(counts)), strict=True)
    ]


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

    With `keys`, a sequence is only what no other has computed, and they say what it attends to.
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
    keys: SharedKeys | None = None

    @property
    def longest(self) -> int:
        """The tokens of the longest row, with those that others computed."""
        return max(self.lengths if self.keys is None else self.keys.lengths)

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        return _map_tensors(self, lambda t: t.to(device, non_blocking=True))


def pack(
    layout: Layout,
    indices: Sequence[int],
    *,
    proximal_logprobs: Sequence[NDArray[np.float32]] | None = None,
    share: bool = False,
) -> MicroBatch:
    """Lays the items `indices`, at least one, end to end; with `share`, tokens that several of them
    begin with only once. The facts about action tokens are in the order of `indices`."""
    packed = [layout.packed[i] for i in indices]
    counts = [p.actions.size for p in packed]
    arranged = layout.order.arrange(indices, share=share)
    computed = [(i, shared) for i, shared in arranged if shared < layout.packed[i].input_ids.size]
    lengths = [layout.packed[i].input_ids.size - shared for i, shared in computed]
    places, first = _places(layout, arranged)
    ids = _joined([p.input_ids for p in packed], np.int64)
    actions = _joined([p.actions for p in packed], np.int64)
    starts = bounds([p.input_ids.size for p in packed])[:-1]
    local = [
        np.unique(ids, return_inverse=True)
        for ids in (
            _joined([p.turn_ids for p in packed], np.int64),
            np.repeat([p.rollout_id for p in packed], counts),
            np.repeat([p.group_id for p in packed], counts),
        )
    ]
    items = [layout.items[i] for i in indices]

    def logprobs(name: str) -> Tensor | None:
        values = [getattr(item.attachments, name) for item in items]
        return None if values[0] is None else _tensor(values, np.float32)

    versions = [
        np.full(count, UNKNOWN_VERSION) if (own := item.attachments.versions) is None else own
        for item, count in zip(items, counts, strict=True)
    ]

    loss = LossBatch(
        weights=_tensor([p.weights for p in packed], np.float32),
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
        else _tensor([proximal_logprobs[i] for i in indices], np.float32),
        reference_logprobs=logprobs("reference_logprobs"),
        teacher_logprobs=logprobs("teacher_logprobs"),
        versions=_tensor(versions),
    )
    temperatures = np.repeat([item.temperature for item in items], counts).astype(np.float32)
    return MicroBatch(
        input_ids=_tensor([layout.packed[i].input_ids[shared:] for i, shared in computed]),
        position_ids=torch.from_numpy(ranges([shared for _, shared in computed], lengths)),
        cu_seqlens=_boundaries(lengths),
        lengths=tuple(lengths),
        action_positions=torch.from_numpy(
            places[np.repeat([first[i] for i in indices], counts) + actions - 1]
        ),
        target_ids=torch.from_numpy(ids[np.repeat(starts, counts) + actions]),
        temperatures=torch.from_numpy(temperatures),
        loss=loss,
        kept=_kept(layout, indices),
        keys=_keys(places, [(first[i], layout.packed[i].input_ids.size) for i, _ in computed])
        if any(shared for _, shared in arranged)
        else None,
    )


def _places(
    layout: Layout, arranged: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], dict[int, int]]:
    """Where the rows' tokens are in the packed row: those of all rows end to end, and where each
    row begins among them."""
    sizes = [layout.packed[row].input_ids.size for row, _ in arranged]
    places = np.empty(sum(sizes), np.int64)
    computed = np.arange(places.size)
    first: dict[int, int] = {}
    before = at = end = 0
    for (row, shared), size in zip(arranged, sizes, strict=True):
        places[at : at + shared] = places[before : before + shared]
        own = size - shared
        places[at + shared : at + size] = computed[end : end + own]
        before = first[row] = at
        at, end = at + size, end + own
    return places, first


def _keys(places: NDArray[np.int64], rows: Sequence[tuple[int, int]]) -> SharedKeys:
    """The keys of the rows that begin at some of the places, each with its length."""
    starts, lengths = zip(*rows, strict=True)
    return SharedKeys(
        torch.from_numpy(places[ranges(starts, lengths)]), _boundaries(lengths), lengths
    )


def _boundaries(lengths: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))


def _tensor(arrays: Sequence[Any], dtype: Any = np.int64) -> Tensor:
    return torch.from_numpy(_joined(arrays, dtype))


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
    return KeptIds(_tensor(rows), torch.tensor(bounds([len(row) for row in rows])))


def _joined(arrays: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate(arrays, dtype=dtype, casting="unsafe")


def _map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """`value`, a dataclass, with `change` applied to every tensor in it."""
    updates: dict[str, Any] = {}
    for field in fields(value):  # type: ignore[arg-type]
        member = getattr(value, field.name)
        if isinstance(member, Tensor):
            updates[field.name] = change(member)
        elif isinstance(member, (LossBatch, KeptIds, SharedKeys)):
            updates[field.name] = _map_tensors(member, change)
    return replace(value, **updates)  # type: ignore[type-var]
