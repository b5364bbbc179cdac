"""Admission to the engine: which requests cannot be served, and how many may wait inside."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from ludic.errors import RequestRejectedError
from ludic.inference.client import TokenCompletionRequest, completion_room
from ludic.inference.local.prefix_store import key_of_ids
from ludic.types import are_ids


def checked_request(
    request: TokenCompletionRequest, *, vocab: int, context: int
) -> tuple[int, bytes]:
    """How many tokens the completion may have, and the prompt's `key_of_ids`. Raises
    `RequestRejectedError` for what cannot be served by a model with so many ids and so long a
    context."""
    ids, sampling = request.prompt_token_ids, request.sampling
    completion_room(ids, context, "max_context_tokens")
    if sampling.stop_token_ids and (bad := [t for t in sampling.stop_token_ids if t >= vocab]):
        raise RequestRejectedError(f"stop_token_ids {bad} are outside of the vocabulary")
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise RequestRejectedError(f"timeout_s={request.timeout_s}: must be more than 0")
    try:
        key = key_of_ids(ids) if are_ids(ids) else b""
    except OverflowError:  # an id of more than 32 bits
        key = b""
    # Not NumPy's `argmax`: it frees the GIL, at every request, whatever the length.
    if not key or max(ids) >= vocab:
        i, token = next(
            (i, t) for i, t in enumerate(ids) if type(t) is not int or not 0 <= t < vocab
        )
        why = (
            f"is outside of the vocabulary (0 to {vocab - 1})"
            if type(token) is int
            else f"is of type {type(token).__name__}: give plain ints, such as .tolist() makes"
        )
        raise RequestRejectedError(f"prompt_token_ids[{i}] = {token!r} {why}")
    room = context - len(ids)
    return room if sampling.max_tokens is None else min(room, sampling.max_tokens), key


class QueueGate:
    """Counts the places of a bounded queue. Entered from event loops, left from any thread.

    The lock guards the count and the line outside; nothing waits while it holds it. A place that is
    left goes straight to the first in line and is never free in between, so nobody overtakes. That
    one may have given up at the same moment: futures are settled in their own loop only, so either
    `_hand_over` finds it done and passes the place on, or `enter` is cancelled after it got the
    place and leaves it.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0
        self._lock = threading.Lock()
        self._outside: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    def try_enter(self) -> bool:
        """Takes a place if one is free and nobody waits in line."""
        with self._lock:
            if self.taken >= self.places or self._outside:
                return False
            self.taken += 1
            return True

    async def enter(self) -> None:
        """Takes a place, in order of arrival; safe to cancel."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self.taken < self.places and not self._outside:
                self.taken += 1
                return
            future: asyncio.Future[None] = loop.create_future()
            self._outside.append((loop, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Frees a place, or hands it to the next in line."""
        while True:
            with self._lock:
                if not self._outside:
                    self.taken -= 1
                    return
                loop, future = self._outside.popleft()
            try:
                loop.call_soon_threadsafe(self._hand_over, future)
                return
            except RuntimeError:  # that loop is closed: its request is gone
                continue

    def _hand_over(self, future: asyncio.Future[None]) -> None:
        if future.done():
            self.leave()
        else:
            future.set_result(None)
