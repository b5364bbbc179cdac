"""Rows that begin with the same tokens: what they have in common is computed once.

In the order of their tokens, rows that begin alike are neighbours. So a row shares what it has in
common with the row before it, and only the rest of it is computed: queries that see the keys of the
shared tokens and their own. A hidden state depends on the tokens up to it and on nothing else, so
values and gradients are those of rows that are computed whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from ludic.saw.batch import bounds, ranges

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
        lengths = [row.size for row in rows]
        starts, ids = bounds(lengths), np.concatenate(rows)
        data = ids.astype(">u4").tobytes()  # compares like the ids themselves
        keys = [data[4 * a : 4 * b] for a, b in pairwise(starts)]
        order = sorted(range(len(rows)), key=keys.__getitem__)
        ranks = sorted(range(len(rows)), key=order.__getitem__)
        return cls(tuple(lengths), tuple(ranks), (0, *_in_common(ids, starts, order)))

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


def _in_common(ids: NDArray[np.int64], starts: Sequence[int], order: Sequence[int]) -> list[int]:
    """How many tokens each row but the first, in this order, begins with of the row before it."""
    firsts = np.array(starts[:-1])[order]
    lengths = np.diff(starts)[order]
    shorter = np.minimum(lengths[1:], lengths[:-1])
    differs = ids[ranges(firsts[1:], shorter)] != ids[ranges(firsts[:-1], shorter)]
    places = differs.nonzero()[0]
    begins = shorter.cumsum() - shorter
    pairs = begins.searchsorted(places, "right") - 1
    found = shorter.copy()
    # Backwards: of several numbers for one place, the last stays.
    found[pairs[::-1]] = (places - begins[pairs])[::-1]
    common: list[int] = found.tolist()
    return common


def gather(
    values: Float[Tensor, "length ..."], places: Int[Tensor, " places"]
) -> Float[Tensor, "places ..."]:
    """`values` at `places`, any of them any number of times. The gradients of one place are added
    up in float32 at least: many in a narrow type would be rounded as often."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return values.to(wide).index_select(0, places).to(values.dtype)
