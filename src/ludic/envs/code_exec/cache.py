"""Results by code and tests: the same answer to the same task is tried once."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ResultCache(Generic[T]):
    """The last `max_entries` results. Any thread may use it.

    Two threads with the same question may both work on it; the answer is the same. What raises
    (a sandbox that failed) leaves nothing behind.
    """

    def __init__(self, max_entries: int = 16384) -> None:
        self.max_entries = max_entries
        self.hits = self.misses = 0
        self._lock = threading.Lock()
        self._results: OrderedDict[bytes, T] = OrderedDict()

    def get(
        self, key: bytes, work: Callable[[], T], keep: Callable[[T], bool] = lambda result: True
    ) -> T:
        """What `work()` returned for this key before, or returns now; remembered if `keep`."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
                self.hits += 1
                return self._results[key]
            self.misses += 1
        result = work()
        if not keep(result):
            return result
        with self._lock:
            self._results[key] = result
            while len(self._results) > self.max_entries:
                self._results.popitem(last=False)
        return result

    def clear(self) -> None:
        with self._lock:
            self._results.clear()

    def __len__(self) -> int:
        return len(self._results)


def fingerprint(*parts: Any) -> bytes:
    """A key for JSON-like parts: the same parts, and no others, give the same."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()
