"""Files that grow by blocks of lines, each of which can be read alone: what the logs of rollouts
and of tokens have in common. A thread of its own encodes and writes."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Generic, Self, TypeVar

from ludic.errors import ConfigError, DeadlineError, SerializationError
from ludic.plumbing.files import sync
from ludic.plumbing.text import error_text
from ludic.rollouts.lines import LONGEST_LINE, as_stored, mend_last_line

T = TypeVar("T")
_log = logging.getLogger("ludic.rollouts")

BLOCK_ITEMS = 256
BLOCK_BYTES = 1 << 20
LINGER_S = 0.25
"""How long the first item of a block waits for others."""
_POLL_S = 0.005


class BlockWriter(Generic[T]):
    """Encodes items and appends them to a file in a thread of its own.

    At most `max_waiting` items wait; then `put` blocks, and a coroutine awaits `room` first.
    An error of the disk is raised by every later call: nothing more is written, and the file ends
    with its last whole block. An item that cannot be encoded costs only itself: it is left out with
    a line of warning, and counted in `lost`.

    Any thread may call. `_lock` guards what waits and the error; the file belongs to the writing
    thread alone from its start to its end.
    """

    def __init__(
        self,
        path: Path,
        encode: Callable[[T], bytes],
        *,
        max_waiting: int = 1024,
        timeout_s: float = 300.0,
    ) -> None:
        self.path, self.encode = path, encode
        self.max_waiting, self.timeout_s = max_waiting, timeout_s
        # Reentrant: garbage collection may close a writer that nobody holds, in any thread.
        self._lock = threading.RLock()
        self._work, self._room = threading.Condition(self._lock), threading.Condition(self._lock)
        self._waiting: deque[T | Future[None]] = deque()
        self._flushes = 0  # how many of those that wait are requests to flush
        self._error: BaseException | None = None
        self._closed = False
        self._process = os.getpid()
        self._synced_folder = path.exists()
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115
        self._end = self._file.seek(0, os.SEEK_END)
        self._broken = False
        self.lost = 0
        """How many items could not be encoded. Written by the thread alone."""
        self._thread = threading.Thread(target=self._run, name="ludic-rollouts", daemon=True)

    def put(self, item: T) -> None:
        """Hands an item over; blocks while too many wait."""
        with self._lock:
            self._check()
            if len(self._waiting) >= self.max_waiting:
                self._room.wait_for(
                    lambda: self._error or len(self._waiting) < self.max_waiting, self.timeout_s
                )
                self._check()
                if len(self._waiting) >= self.max_waiting:
                    raise self._late("room for another rollout")
            self._add(item)

    async def room(self) -> None:
        """Returns when `put` will not block, unless others put at the same time."""
        if len(self._waiting) < self.max_waiting:
            return
        deadline = time.monotonic() + self.timeout_s
        while len(self._waiting) >= self.max_waiting and self._error is None:
            if time.monotonic() > deadline:
                raise self._late("room for another rollout")
            await asyncio.sleep(_POLL_S)

    def flush(self) -> None:
        """Returns when all that was put before is on disk."""
        if (done := self._ask()) is None:
            return
        try:
            done.result(self.timeout_s)
        except TimeoutError:
            if done.done():
                raise
            raise self._late("a flush") from None

    async def flush_async(self) -> None:
        """`flush` for coroutines."""
        if (done := self._ask()) is None:
            return
        found, _ = await asyncio.wait([asyncio.wrap_future(done)], timeout=self.timeout_s)
        if not found:
            raise self._late("a flush")
        found.pop().result()

    def close(self) -> None:
        """Writes what waits, closes the file, and raises the thread's error, if it had one. A
        second call does nothing, and neither does one in a forked process."""
        with self._lock:
            if self._closed or os.getpid() != self._process:
                return
            self._closed = True
            self._work.notify()
        if self._thread.ident is None:
            self._file.close()
            return
        if self._thread is threading.current_thread():
            return
        self._thread.join(self.timeout_s)
        if self._thread.is_alive():
            raise self._late("the end")
        if self._error is not None:
            raise self._error

    def close_at_exit(self) -> None:
        """Closes what nobody closed; an error can only be logged any more."""
        try:
            self.close()
        except Exception as exc:
            _log.error("%s: not all rollouts were written: %s", self.path, exc)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise SerializationError(f"{self.path} was written to after it was closed")
        if os.getpid() != self._process:
            raise SerializationError(f"{self.path} was opened by another process, which writes it")

    def _ask(self) -> Future[None] | None:
        """A request to flush; None if there is nothing to write."""
        with self._lock:
            if self._thread.ident is None or (self._closed and self._error is None):
                return None
            self._check()
            done: Future[None] = Future()
            self._flushes += 1
            self._add(done)
        return done

    def _add(self, item: T | Future[None]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._waiting.append(item)
        # One call per item would be dear: the thread has to know of a block's first and last.
        if len(self._waiting) in (1, BLOCK_ITEMS) or self._flushes:
            self._work.notify()

    def _late(self, what: str) -> DeadlineError:
        return DeadlineError(what, f"the thread that writes {self.path}", self.timeout_s)

    # What follows runs in the writing thread.

    def _run(self) -> None:
        while items := self._next_block():
            try:
                self._write(items)
            except BaseException as exc:
                self._fail(exc)
                for item in items:
                    if isinstance(item, Future) and not item.done():
                        item.set_exception(exc)
        try:
            self._sync()
            self._file.close()
        except OSError as exc:
            self._fail(exc)

    def _next_block(self) -> list[T | Future[None]]:
        """Waits for items; none are left when it returns none."""
        with self._lock:
            while not self._waiting and not self._closed:
                self._work.wait()
            self._work.wait_for(
                lambda: len(self._waiting) >= BLOCK_ITEMS or self._flushes or self._closed,
                LINGER_S,
            )
            count = min(len(self._waiting), BLOCK_ITEMS)
            items = [self._waiting.popleft() for _ in range(count)]
            self._flushes -= sum(isinstance(item, Future) for item in items)
            self._room.notify_all()
        return items

    def _write(self, items: list[T | Future[None]]) -> None:
        lines: list[bytes] = []
        size = 0
        for item in items:
            if isinstance(item, Future):
                self._store(lines)
                lines, size = [], 0
                self._answer(item)
                continue
            try:
                line = self.encode(item)
                if len(line) > LONGEST_LINE:
                    raise SerializationError(
                        f"it takes {len(line):,} bytes; the limit is {LONGEST_LINE:,}"
                    )
            except Exception as exc:
                self.lost += 1
                _log.warning("%s: an entry was left out: %s", self.path, error_text(exc))
                continue
            lines.append(line)
            size += len(lines[-1])
            if size >= BLOCK_BYTES:
                self._store(lines)
                lines, size = [], 0
        self._store(lines)

    def _store(self, lines: list[bytes]) -> None:
        if self._broken or not lines:
            return
        data = memoryview(as_stored(self.path, b"".join(lines)))
        end = self._end + len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as exc:
            self._broken = True
            self._fail(exc)
            self._file.truncate(self._end)
            return
        self._end = end

    def _answer(self, flush: Future[None]) -> None:
        if not flush.set_running_or_notify_cancel():
            return
        try:
            self._sync()
        except OSError as exc:
            self._broken = True
            self._fail(exc)
        if self._error is None:
            flush.set_result(None)
        else:
            flush.set_exception(self._error)

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        if not self._synced_folder:
            sync(self.path.parent)
            self._synced_folder = True

    def _fail(self, exc: BaseException) -> None:
        with self._lock:
            if self._error is None:
                if isinstance(exc, OSError) and exc.filename is None:
                    exc.filename = str(self.path)
                self._error = exc
            self._room.notify_all()


class BlockFile(Generic[T]):
    """Appends items to a file, in blocks, from a thread of its own. An existing file is refused
    unless `append` is true; then what an earlier run left unfinished at its end is cut off."""

    def __init__(
        self,
        path: str | Path,
        encode: Callable[[T], bytes],
        *,
        append: bool = False,
        max_waiting: int = 1024,
    ) -> None:
        self.path = Path(path)
        if self.path.exists():
            if not append:
                raise ConfigError(
                    f"{self.path} already exists: choose another path, or "
                    f"{type(self).__name__}(path, append=True)"
                )
            mend_last_line(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._blocks = BlockWriter(self.path, encode, max_waiting=max_waiting)
        weakref.finalize(self, self._blocks.close_at_exit)

    @property
    def lost(self) -> int:
        """How many items were left out so far because they cannot be encoded."""
        return self._blocks.lost

    def flush(self) -> None:
        """Returns when everything written so far is on disk."""
        self._blocks.flush()

    async def flush_async(self) -> None:
        """`flush` without holding up the event loop."""
        await self._blocks.flush_async()

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        self._blocks.close()

    async def aclose(self) -> None:
        """`close` without holding up the event loop."""
        try:
            await self._blocks.flush_async()
        finally:
            self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as error:
            self._beside(exc, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        except Exception as error:
            self._beside(exc, error)

    def _beside(self, exc: BaseException | None, error: Exception) -> None:
        """Raises `error`, unless `exc` is on its way already: then says it in a note."""
        if exc is None:
            raise error
        if exc is not error:
            exc.add_note(f"{self.path}: not everything was written: {error}")
