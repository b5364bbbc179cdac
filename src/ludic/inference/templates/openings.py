"""Prompts by the messages that they spell: a group of episodes begins with the same ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from ludic.types import Message

T = TypeVar("T")

_KEPT = 256
_MOST_MESSAGES = 8
_MOST_CHARS = 32_768


class Openings(Generic[T]):
    """Remembers what was made of the last few short conversations. Safe to share between threads:
    writers take the lock, and a reader at worst finds nothing."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, ...], T] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: tuple[str, ...] | None) -> T | None:
        """What was kept under `key`, if it still is."""
        return None if key is None else self._kept.get(key)

    def keep(self, key: tuple[str, ...] | None, made: T) -> None:
        """Keeps `made`, and lets go of the oldest when there are many."""
        if key is None:
            return
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)


def spelling(messages: Sequence[Message]) -> tuple[str, ...] | None:
    """Roles and contents in turn; None for a long conversation, or one that holds more."""
    if len(messages) > _MOST_MESSAGES:
        return None
    parts: list[str] = []
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return None
        role, content = message.get("role"), message.get("content")
        if type(role) is not str or type(content) is not str:
            return None
        parts += (role, content)
    return tuple(parts) if sum(map(len, parts)) <= _MOST_CHARS else None
