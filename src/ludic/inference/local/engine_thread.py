"""The engine's thread: takes requests in, computes steps, and pauses while weights change."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ludic.errors import EngineClosedError, PublishError
from ludic.inference.client import Waiter
from ludic.inference.local.admission import QueueGate
from ludic.inference.local.scheduler import Scheduler
from ludic.inference.local.sequence import Sequence
from ludic.plumbing.precision import Precision, float32_products


@dataclass(eq=False, slots=True)
class Pause:
    """Somebody wants the weights for itself. `drain`: what is in flight ends first.

    `ready` is set by the engine's thread, `released` by whoever asked; both under the lock, and
    neither goes back.
    """

    drain: bool
    on_ready: Callable[[BaseException | None], None]
    ready: bool = False
    released: bool = False


class Outbox:
    """Gathers what a step has to say, and hands it over once for each event loop: waking a loop
    costs more than an answer. Only the engine's thread touches it."""

    def __init__(self) -> None:
        self._answers: dict[asyncio.AbstractEventLoop, list[tuple[Waiter, Any]]] = {}

    def put(self, waiter: Waiter, answer: Any) -> None:
        """Keeps an answer, or an error, until the next `hand_over`."""
        self._answers.setdefault(waiter.get_loop(), []).append((waiter, answer))

    def hand_over(self) -> None:
        """Sends everything on its way."""
        while self._answers:
            loop, answers = self._answers.popitem()
            call_in(loop, answers)


def call_in(loop: asyncio.AbstractEventLoop, answers: list[tuple[Waiter, Any]]) -> None:
    """Settles the futures of `loop` there, from any thread."""
    try:
        loop.call_soon_threadsafe(settle, answers)
    except RuntimeError:  # the loop is closed: nobody waits there any more
        return


def settle(answers: list[tuple[Waiter, Any]]) -> None:
    """Gives each future its result or its error, unless it has one; call it in their loop."""
    for waiter, answer in answers:
        if waiter.done():
            continue
        if isinstance(answer, BaseException):
            waiter.set_exception(answer)
        else:
            waiter.set_result(answer)


class EngineThread:
    """Owns a scheduler. Every method may be called from any thread and returns at once, except for
    `join`.

    One lock, that of `_changed`, guards what is shared: the inbox, the pauses, the version and
    whether the thread is closing. The scheduler is not shared and has no lock: the thread alone
    touches it, and computes a step with the lock free, so requests, cancellations and pauses come
    in while a step runs and are seen before the next one. (With the lock it waits for no more than
    the steps already in flight, in `settle`.)

    While a pause is ready the thread computes nothing: it waits for `_changed`, which frees the
    lock. So the holder of the pause may write the weights, and others may still hand in
    requests. Pauses are granted one after the other, in the order they were asked for. Only this
    thread ever waits for `_changed`, hence `notify` and not `notify_all`.
    """

    def __init__(
        self, scheduler: Scheduler, gate: QueueGate, precision: Precision | None = None
    ) -> None:
        self._scheduler, self._precision = scheduler, precision
        self.outbox = Outbox()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inbox: list[Sequence] = []
        self._pauses: list[Pause] = []
        self.version = scheduler.version
        self.closed = self._waits = False
        self._crash: BaseException | None = None
        scheduler.on_admit = gate.leave
        scheduler.gather = self._gather
        self._thread = threading.Thread(target=self._loop, name="ludic-local-engine", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence that has a place in the gate."""
        self._hand_in(self._inbox, sequence)

    def cancel(self, sequence: Sequence) -> None:
        """The sequence leaves before the next step; nothing is delivered for it any more."""
        sequence.cancelled = True
        with self._changed:
            self._changed.notify()

    def pause(self, pause: Pause) -> None:
        """Asks for the weights: `on_ready` is called when no step samples any longer."""
        self._hand_in(self._pauses, pause)

    def _hand_in(self, where: list[Any], what: Any) -> None:
        with self._lock:
            if self.closed:
                raise self.closed_error()
            where.append(what)
            if self._waits:  # else it looks by itself before it waits
                self._changed.notify()

    def release(self, pause: Pause) -> None:
        """Hands the weights back. A pause that is not ready yet is called off."""
        with self._changed:
            pause.released = True
            self._changed.notify()

    def check_version(self, version: int) -> None:
        """Raises `PublishError` for a version that goes back."""
        if version < self.version:
            raise PublishError(
                f"policy version {version} after {self.version}: versions only go forward"
            )

    def set_version(self, version: int) -> None:
        """Names the weights as they are now; the engine takes it up between two steps."""
        with self._changed:
            self.check_version(version)
            self.version = version
            self._changed.notify()

    def close(self) -> None:
        """Ends every request with `EngineClosedError`, then the thread."""
        with self._changed:
            self.closed = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end; False when it did not end in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def closed_error(self) -> EngineClosedError:
        """The error of a request to an engine that ended, with what ended it as the cause."""
        if self._crash is None:
            return EngineClosedError("the in-process engine is closed: make a new LocalChatClient")
        error = EngineClosedError(
            f"the engine's thread ended by an error: {self._crash!r}; make a new LocalChatClient"
        )
        error.__cause__ = self._crash
        return error

    # In the thread

    def _loop(self) -> None:
        torch.get_num_threads()  # takes up for this thread what `torch.set_num_threads` set
        with torch.inference_mode():
            try:
                with self._scheduler.in_thread():
                    while self._next():
                        begin = time.perf_counter()
                        # Not for the thread's life: an engine that is only there holds nothing.
                        with float32_products(self._precision):
                            self._scheduler.advance()
                        self.outbox.hand_over()
                        self._scheduler.counters.busy_seconds += time.perf_counter() - begin
            except BaseException as exc:
                # A fault of the engine itself: nobody must be left waiting for it.
                self._crash = exc
            finally:
                self._shut_down()

    def _next(self) -> bool:
        """Waits until there is a step to do. False: the engine is closing."""
        scheduler = self._scheduler
        with self._changed:
            while True:
                if self.closed:
                    return False
                self._take_in()
                self._pauses[:] = [p for p in self._pauses if not p.released]
                self._apply_version()
                scheduler.admitting = not self._pauses
                if self._pauses:
                    if not (self._pauses[0].drain and scheduler.running):
                        self._stand_still(self._pauses[0])
                        continue
                    return True
                if scheduler.has_work:
                    return True
                self.outbox.hand_over()
                self._wait()

    def _wait(self) -> None:
        """Until something is handed in or changes; called with the lock."""
        self._waits = True
        self._changed.wait()
        self._waits = False

    def _gather(self) -> None:
        """Waits a moment for the event loop to hand in what it has at hand."""
        self.outbox.hand_over()
        # Read without the lock: a length that is out of date costs another millisecond at most.
        seen = -1
        while seen != len(self._inbox) and not self.closed:
            seen = len(self._inbox)
            time.sleep(0.001)
        with self._changed:
            self._take_in()

    def _take_in(self) -> None:
        """Moves the inbox to the scheduler's queue; call it with the lock."""
        self._scheduler.waiting.extend(self._inbox)
        self._inbox.clear()

    def _stand_still(self, pause: Pause) -> None:
        """Nothing is sampled until the pause is released, or the engine closes. Called with the
        lock, which is free while it waits."""
        self._scheduler.settle()
        self.outbox.hand_over()
        pause.ready = True
        pause.on_ready(None)
        while not (pause.released or self.closed):
            # Those that gave up meanwhile must not fill the queue.
            self._take_in()
            self._scheduler.drop_cancelled_waiting()
            self._wait()
        # The holder may have changed any weight: nothing computed before is worth keeping.
        self._scheduler.forget()
        self._scheduler.counters.updates += 1

    def _apply_version(self) -> None:
        if self._scheduler.version != self.version:
            self._scheduler.settle()
            self._scheduler.version = self.version
            self._scheduler.forget()

    def _shut_down(self) -> None:
        with self._changed:
            self.closed = True
            self._take_in()
        # Nobody can hand in a pause any more.
        for pause in self._pauses:
            if not pause.ready:
                pause.on_ready(self.closed_error())
        self._scheduler.abandon(self.closed_error)
        self.outbox.hand_over()
