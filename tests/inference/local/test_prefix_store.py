"""The store of prefixes against a plain scan, and what it costs."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ludic.inference.local.prefix_store import PrefixStore, common_prefix

Tokens = NDArray[np.int64]


def array(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int64)


def kv_of(tokens: Tokens) -> torch.Tensor:
    return torch.zeros(1, 2, 1, len(tokens), 1)


class Scan:
    """The same promises, kept by looking at every entry. The least recently used stands first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.entries = max_tokens, list[Tokens]()

    def longest(self, tokens: Tokens) -> int:
        length = max((common_prefix(e, tokens) for e in self.entries), default=0)
        return length if length >= 8 else 0

    def use(self, entry: Tokens) -> None:
        place = next(i for i, e in enumerate(self.entries) if np.array_equal(e, entry))
        self.entries.append(self.entries.pop(place))

    def add(self, tokens: Tokens) -> None:
        if not 8 <= len(tokens) <= self.max_tokens:
            return
        if covering := [e for e in self.entries if common_prefix(e, tokens) == len(tokens)]:
            self.use(min(covering, key=list))
            return
        self.entries = [e for e in self.entries if common_prefix(e, tokens) != len(e)]
        while sum(map(len, self.entries)) + len(tokens) > self.max_tokens:
            self.entries.pop(0)
        self.entries.append(tokens)


# Two values only, one of them of several bytes: much is shared, and the order of bytes matters.
sequences = st.builds(
    lambda stem, own: array([7] * stem + own),
    st.integers(0, 12),
    st.lists(st.sampled_from([1, 256, 151_935]), max_size=6),
)


@given(
    steps=st.lists(st.tuples(st.booleans(), sequences), max_size=40),
    max_tokens=st.sampled_from([0, 20, 60, 1000]),
)
def test_the_longest_shared_prefix_is_found_and_the_same_entries_stay_as_by_a_scan(
    steps: list[tuple[bool, Tokens]], max_tokens: int
) -> None:
    store, scan = PrefixStore[torch.Tensor](max_tokens), Scan(max_tokens)
    for adds, tokens in steps:
        if adds:
            store.add(tokens, partial(kv_of, tokens))
            scan.add(tokens)
        else:
            entry, shared = store.find(tokens)
            assert shared == scan.longest(tokens)
            assert (entry is None) == (shared == 0)
            if entry is not None:
                assert common_prefix(entry.tokens, tokens) == shared
                scan.use(entry.tokens)
        assert len(store) == len(scan.entries)
        assert store.tokens == sum(map(len, scan.entries)) <= max_tokens
    for tokens in scan.entries:
        entry, shared = store.find(tokens)
        assert entry is not None
        assert shared == len(tokens) == entry.kept.shape[3]


def test_a_store_full_of_one_system_prompt_is_as_quick_as_a_small_one() -> None:
    def seconds(entries: int) -> float:
        store = PrefixStore[torch.Tensor](10**9)
        for i in range(entries):
            tokens = array([1] * 100 + [i] + [2] * 20)
            store.add(tokens, partial(kv_of, tokens))
        best = float("inf")
        for _ in range(5):
            start = time.thread_time()
            for i in range(50):
                store.find(array([1] * 100 + [10**6 + i]))
            best = min(best, time.thread_time() - start)
        return best

    # A scan would take 100 times as long.
    assert seconds(3000) < 10 * seconds(30)
