"""Finds shared prefixes: among running sequences, and in the cache of finished ones."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

_WORTH_KEEPING = 8
T = TypeVar("T")
Tokens: TypeAlias = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Prefix(Generic[T]):
    """Tokens, and whatever holds their keys and values."""

    tokens: NDArray[np.int64]
    kept: T


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences share at their beginning."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


class TokenOrder(Generic[T]):
    """Things in the order of their tokens, as words in a dictionary: what shares the most with a
    sequence stands right before or right after the place where it would go. Finding that place
    takes a few comparisons, not one for each entry. Of things with the same tokens the one that
    came first is found.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._things: list[T] = []

    def add(self, key: bytes, thing: T) -> None:
        place = bisect_right(self._keys, key)
        self._keys.insert(place, key)
        self._things.insert(place, thing)

    def remove(self, key: bytes, thing: T) -> None:
        place = bisect_left(self._keys, key)
        while self._things[place] is not thing:
            place += 1
        del self._keys[place], self._things[place]

    def neighbours(self, key: bytes) -> list[T]:
        """The things right before and right after the place of `key`, or at it."""
        place = bisect_left(self._keys, key)
        return self._things[max(0, place - 1) : place + 1]

    def clear(self) -> None:
        self._keys.clear()
        self._things.clear()


class PrefixStore(Generic[T]):
    """At most `max_tokens` tokens, the least recently used leave first.

    An entry that a longer one begins with is dropped when that one comes: a conversation keeps its
    last turn only. So no entry begins with another one. `on_drop` is told what an entry kept.
    """

    def __init__(self, max_tokens: int, on_drop: Callable[[T], None] | None = None) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._on_drop = on_drop
        self._entries: OrderedDict[bytes, Prefix[T]] = OrderedDict()
        self._in_order = TokenOrder[bytes]()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Tokens) -> tuple[Prefix[T] | None, int]:
        """The entry that shares the most tokens with these, and how many; less than
        `_WORTH_KEEPING` shared tokens are not worth finding."""
        best, length = None, 0
        wanted = token_key(tokens)
        for key in self._in_order.neighbours(wanted):
            entry = self._entries[key].tokens
            # As a conversation's next turn does with the last one.
            shared = len(entry) if wanted.startswith(key) else common_prefix(entry, tokens)
            if shared > length:
                best, length = key, shared
        if best is None or length < _WORTH_KEEPING:
            return None, 0
        self._entries.move_to_end(best)
        return self._entries[best], length

    def add(self, tokens: NDArray[np.int64], keep: Callable[[], T]) -> None:
        """Keeps what `keep` returns, unless the tokens are covered already or more than the whole
        store takes. It is called when there is room."""
        if len(tokens) < _WORTH_KEEPING or len(tokens) > self.max_tokens:
            return
        key = token_key(tokens)
        for other in self._in_order.neighbours(key):
            if other.startswith(key):
                self._entries.move_to_end(other)
                return
            if key.startswith(other):
                self._drop(other)
        while self.tokens + len(tokens) > self.max_tokens:
            self._drop(next(iter(self._entries)))
        self._entries[key] = Prefix(tokens, keep())
        self._in_order.add(key, key)
        self.tokens += len(tokens)

    def clear(self) -> None:
        entries = list(self._entries.values())
        self._entries.clear()
        self._in_order.clear()
        self.tokens = 0
        if self._on_drop is not None:
            for entry in entries:
                self._on_drop(entry.kept)

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._in_order.remove(key, key)
        self.tokens -= len(entry.tokens)
        if self._on_drop is not None:
            self._on_drop(entry.kept)


PACKED = np.dtype(">u4")
"""The tokens as keys have them."""


def token_key(tokens: Tokens) -> bytes:
    """The tokens as bytes in the same order."""
    # The highest byte first: bytes then stand in the order of the tokens.
    return tokens.astype(PACKED).tobytes()


def key_of_ids(token_ids: Sequence[int]) -> bytes:
    """`token_key` of plain integers. Raises `OverflowError` for those that 32 bits do not hold."""
    packed = array("I", token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()
