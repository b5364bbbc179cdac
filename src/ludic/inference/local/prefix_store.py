"""What was computed for sequences that ended, kept for those that begin the same way."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_KEY_TOKENS = 8


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
    last turn only.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._entries: OrderedDict[int, Prefix] = OrderedDict()
        self._by_start: dict[bytes, set[int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: NDArray[np.int64]) -> tuple[Prefix | None, int]:
        """The entry that shares the most tokens with these, and how many; less than
        `_KEY_TOKENS` shared tokens are not worth finding."""
        best, length = None, 0
        for number in self._by_start.get(self._start(tokens), ()):
            shared = common_prefix(self._entries[number].tokens, tokens)
            if shared > length:
                best, length = number, shared
        if best is None:
            return None, 0
        self._entries.move_to_end(best)
        return self._entries[best], length

    def add(self, tokens: NDArray[np.int64], kv: Tensor) -> None:
        """Keeps a copy of `kv`, unless it is covered already or larger than the whole store."""
        if len(tokens) < _KEY_TOKENS or len(tokens) > self.max_tokens:
            return
        start = self._start(tokens)
        for number in list(self._by_start.get(start, ())):
            other = self._entries[number].tokens
            shared = common_prefix(other, tokens)
            if shared == len(tokens):
                self._entries.move_to_end(number)
                return
            if shared == len(other):
                self._drop(number)
        while self.tokens + len(tokens) > self.max_tokens:
            self._drop(next(iter(self._entries)))
        self._entries[self._next] = Prefix(tokens, kv.clone())
        self._by_start.setdefault(start, set()).add(self._next)
        self._next += 1
        self.tokens += len(tokens)

    def clear(self) -> None:
        self._entries.clear()
        self._by_start.clear()
        self.tokens = 0

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        start = self._start(entry.tokens)
        self._by_start[start].discard(number)
        if not self._by_start[start]:
            del self._by_start[start]
        self.tokens -= len(entry.tokens)

    @staticmethod
    def _start(tokens: NDArray[np.int64]) -> bytes:
        return tokens[:_KEY_TOKENS].tobytes()
