"""What was computed for sequences that ended, kept for those that begin the same way."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_WORTH_KEEPING = 8


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Tokens and their keys and values, [layers, 2, kv_heads, tokens, head_dim]."""

    tokens: NDArray[np.int64]
    kv: Tensor


def common_prefix(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many tokens two sequences share at their beginning."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


class PrefixStore:
    """At most `max_tokens` tokens, the least recently used leave first.

    An entry that a longer one begins with is dropped when that one comes: a conversation keeps its
    last turn only. So no entry begins with another one.

    Entries are also kept in the order of their tokens, as in a dictionary: what shares the most
    with a sequence stands right before or right after the place where it would go. Finding that
    place takes a few comparisons, not one for each entry.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._entries: OrderedDict[bytes, Prefix] = OrderedDict()
        self._in_order: list[bytes] = []

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: NDArray[np.int64]) -> tuple[Prefix | None, int]:
        """The entry that shares the most tokens with these, and how many; less than
        `_WORTH_KEEPING` shared tokens are not worth finding."""
        best, length = None, 0
        for key in self._neighbours(_key(tokens)):
            shared = common_prefix(self._entries[key].tokens, tokens)
            if shared > length:
                best, length = key, shared
        if best is None or length < _WORTH_KEEPING:
            return None, 0
        self._entries.move_to_end(best)
        return self._entries[best], length

    def add(self, tokens: NDArray[np.int64], kv: Tensor) -> None:
        """Keeps a copy of `kv`, unless it is covered already or larger than the whole store."""
        if len(tokens) < _WORTH_KEEPING or len(tokens) > self.max_tokens:
            return
        key = _key(tokens)
        for other in self._neighbours(key):
            if other.startswith(key):
                self._entries.move_to_end(other)
                return
            if key.startswith(other):
                self._drop(other)
        while self.tokens + len(tokens) > self.max_tokens:
            self._drop(next(iter(self._entries)))
        self._entries[key] = Prefix(tokens, kv.clone())
        self._in_order.insert(bisect_left(self._in_order, key), key)
        self.tokens += len(tokens)

    def clear(self) -> None:
        self._entries.clear()
        self._in_order.clear()
        self.tokens = 0

    def _neighbours(self, key: bytes) -> list[bytes]:
        """The entries right before and right after the place of `key`, or at it."""
        place = bisect_left(self._in_order, key)
        return self._in_order[max(0, place - 1) : place + 1]

    def _drop(self, key: bytes) -> None:
        del self._in_order[bisect_left(self._in_order, key)]
        self.tokens -= len(self._entries.pop(key).tokens)


def _key(tokens: NDArray[np.int64]) -> bytes:
    # The highest byte first: bytes then stand in the order of the tokens.
    return tokens.astype(">u4").tobytes()
