"""Threads for code that blocks: environments and tools; and an event loop in one, for what must
outlive a call, or must not hold it up. And what other people's code may raise that is no
`Exception` (`sys.exit`, a cancellation that nobody asked for): it costs what that code was called
for, and no more.

A thread cannot be killed. One that runs past its deadline is abandoned: it is counted until it
comes back, and when too many hang, no more are started. The threads are daemons, so that a hung
environment does not keep the program from ending.

What may run at the same time: any number of workers, and the event loops that wait for them. A
`_Call` is written by its worker until `finished` is set, and read by its waiter only after that.
Whether it finished or was given up is decided once, under the lock: the worker sets `finished` and
reads `on_return` in one critical section, the waiter reads `finished` and sets `on_return` in
another. So exactly one of the two happens: the waiter takes the result, or it leaves and the worker
calls `on_return`. An abandoned call is never seen by its waiter again, whatever it still does to
its environment.

To wake a thread costs more than most calls take. So one is woken at a time: it takes a call and,
if more are waiting, wakes the next before it begins; a thread that has finished takes what is
waiting by itself. Quick calls end on a few threads, and calls that block get one each, since there
are always as many threads as calls.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from ludic.errors import DeadlineError, LudicError, NoThreadError
from ludic.plumbing.text import error_text
from ludic.workers.deadlines import deadline

T = TypeVar("T")


class _Call:
    """One function call on its way through a worker, and back to the event loop."""

    __slots__ = ("context", "error", "finished", "fn", "loop", "on_return", "result", "waiter")

    def __init__(self, fn: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.fn: Final = fn
        self.loop: Final = loop
        self.waiter: asyncio.Future[None] = loop.create_future()
        self.context: Final = contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = False
        self.on_return: Callable[[], None] | None = None  # set once the call is given up


class EnvThreads:
    """Runs each blocking call in a separate thread; idle threads are used again.

    No call waits for another to end: as many run as are asked for, up to `max_threads`.
    `abandoned` is the number of threads that hang in a call that nobody waits for any more; past
    `max_abandoned`, calls are refused. Any thread's event loop may use it.
    """

    def __init__(self, *, max_threads: int = 1024, max_abandoned: int = 32) -> None:
        self.max_threads = max_threads
        self.max_abandoned = max_abandoned
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._idle: list[SimpleQueue[None]] = []  # what each idle thread is woken by
        self._one_is_woken = False
        self._answered: dict[asyncio.AbstractEventLoop, list[_Call]] = {}
        self._threads = 0
        self._calls = 0
        self._abandoned = 0

    @property
    def abandoned(self) -> int:
        """How many threads hang in a call that was given up."""
        return self._abandoned

    async def run(
        self,
        fn: Callable[[], Any],
        *,
        what: str,
        whom: str,
        timeout_s: float | None,
        on_abandon: Callable[[], None] | None = None,
        on_return: Callable[[], None] | None = None,
    ) -> Any:
        """The result of `fn()`, run in a worker thread.

        Past the deadline, or when the waiter is cancelled, the thread is abandoned and
        `on_abandon` is called; if the thread ever comes back, `on_return` runs in it, to free
        what the call was using.
        """
        loop = asyncio.get_running_loop()
        call = _Call(fn, loop)
        self._hand_over(call, whom)
        try:
            with suppress(TimeoutError), deadline(timeout_s):
                await call.waiter
        finally:
            given_up = self._give_up_unless_finished(call, on_return)
            if given_up and on_abandon is not None:
                on_abandon()
        if given_up:  # even if it has finished by now: it belongs to `on_return` already
            raise DeadlineError(what, whom, timeout_s or 0.0)
        if call.error is not None:
            raise call.error
        return call.result

    def _hand_over(self, call: _Call, whom: str) -> None:
        with self._lock:
            if self._abandoned > self.max_abandoned:
                raise NoThreadError(
                    f"{whom} was not called: {self._abandoned} worker threads hang past their "
                    f"deadline (limit {self.max_abandoned}). Find out why they hang; for an "
                    'environment, isolation = "process" makes it killable'
                )
            if self._calls == self._threads:
                if self._threads >= self.max_threads:
                    raise NoThreadError(
                        f"{whom} was not called: {self._threads} worker threads are busy "
                        f"(limit {self.max_threads}); lower the number of concurrent episodes"
                    )
                threading.Thread(target=self._work, name="ludic-env", daemon=True).start()
                self._threads += 1  # only now: where no thread can be started, none is running
            self._calls += 1
            self._waiting.append(call)
            self._wake_one()

    def _give_up_unless_finished(self, call: _Call, on_return: Callable[[], None] | None) -> bool:
        with self._lock:
            if call.finished:
                return False
            call.on_return = on_return or (lambda: None)
            self._abandoned += 1
            return True

    def _work(self) -> None:
        bell: SimpleQueue[None] = SimpleQueue()
        while True:
            call = self._next_call(bell)
            try:
                call.result = call.context.run(call.fn)
            except BaseException as error:  # also SystemExit: it must end the episode only
                call.error = error
            self._finish(call)
            del call  # an idle thread keeps nothing alive

    def _next_call(self, bell: SimpleQueue[None]) -> _Call:
        woken = False
        while True:
            with self._lock:
                if woken:
                    self._one_is_woken = False
                if self._waiting:
                    call = self._waiting.popleft()
                    self._wake_one()
                    return call
                self._idle.append(bell)
            bell.get()
            woken = True

    def _wake_one(self) -> None:
        if self._waiting and self._idle and not self._one_is_woken:
            self._one_is_woken = True
            self._idle.pop().put(None)

    def _finish(self, call: _Call) -> None:
        with self._lock:
            call.finished = True
            if call.on_return is None:
                self._calls -= 1
                answered = self._answered_in(call.loop)
                answered.append(call)
        if call.on_return is not None:
            with suppress(BaseException):  # the episode failed already; nobody is left to be told
                call.on_return()
            with self._lock:
                self._calls -= 1
                self._abandoned -= 1
        elif answered[0] is call:
            self._wake(call.loop)

    def _answered_in(self, loop: asyncio.AbstractEventLoop) -> list[_Call]:
        """What the loop has not seen yet. What one has not seen when it is closed, it never will:
        that is forgotten here."""
        if loop not in self._answered:
            for closed in [other for other in self._answered if other.is_closed()]:
                del self._answered[closed]
            self._answered[loop] = []
        return self._answered[loop]

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tells a loop of all that was answered until it looks: waking it costs more than that."""
        try:
            loop.call_soon_threadsafe(self._settle, loop)
        except RuntimeError:  # it was closed meanwhile: nobody is waiting
            with self._lock:
                self._answered.pop(loop, None)

    def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            answered = self._answered.pop(loop)
        for call in answered:
            if not call.waiter.done():
                call.waiter.set_result(None)


_shared = EnvThreads()


def shared_threads() -> EnvThreads:
    """The threads that every runner of this process uses unless told otherwise."""
    return _shared


class BackgroundLoop:
    """A named event loop in a thread of its own, which runs until the process ends.

    Connections belong to the loop that opened them, while episodes come from whatever loop is
    running now; and code that blocks the loop it runs on should block none of ours. Such work is
    sent here. `run` and `call` may be used from any thread and any loop; what is sent runs in the
    loop's thread alone, so it needs no locks. The thread is a daemon and starts with first use.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns, once it has run there. Cancelling this cancels the work."""
        return await asyncio.wrap_future(self._send(work))

    def call(self, work: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """The same for code that is not async. Past the deadline the work is cancelled."""
        future = self._send(work)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():  # the work's own
                raise
            future.cancel()
            raise DeadlineError(what, self.name, timeout_s) from error

    def _send(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name=f"ludic-{self.name}", daemon=True
                ).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def is_for_us(error: BaseException) -> bool:
    """Whether an error that came out of a call is meant for the program: Ctrl-C, or a cancellation
    of the running task. A `CancelledError` that the called code raised by itself is not."""
    if not isinstance(error, asyncio.CancelledError):
        return isinstance(error, KeyboardInterrupt)
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread: there is nothing to cancel
        return False
    return task is not None and task.cancelling() > 0


class contained:
    """Raises what is neither an `Exception` nor meant for us as an error of that kind."""

    __slots__ = ("_kind", "_whom")

    def __init__(self, kind: type[LudicError], whom: str) -> None:
        self._kind, self._whom = kind, whom

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, Exception) or is_for_us(error):
            return
        raise self._kind(f"{self._whom} raised {error_text(error)}") from error
