"""Sandboxes by name, and several at once: as many as there is work for, up to a bound.

What may happen at the same time: any number of threads ask; `_state` guards who holds what. A
sandbox belongs to exactly one lease from the moment it is handed out until it comes back. One that
failed is closed and replaced, and the program is tried once more on another: a `SandboxError` that
reaches the caller has happened twice. When failures follow each other, the breaker opens: for a
while every request is refused at once, instead of each starting sandboxes that cannot work.

A sandbox has one role for its whole life: those that run model-written programs never see what a
judge needs (expected answers, tests, checkers), and those that do never run such a program.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

from ludic.envs.code_exec.sandbox.base import (
    Limits,
    RunResult,
    SandboxError,
    SandboxUnavailableError,
)
from ludic.envs.code_exec.sandbox.bubblewrap import (
    BubblewrapSandbox,
    bubblewrap_version,
    check_bubblewrap,
)
from ludic.envs.code_exec.sandbox.cgroups import writable_parent
from ludic.envs.code_exec.sandbox.plain import PlainSandbox
from ludic.envs.code_exec.sandbox.worker import Sandbox
from ludic.errors import ConfigError, DeadlineError, UnknownNameError

T = TypeVar("T")
Role = Literal["program", "judge"]
"""Whose code a sandbox runs: anybody's, or only that of the task's author."""

DEFAULT_SANDBOX = "bubblewrap"
QUEUE_S = 600.0
SANDBOXES: dict[str, type[BubblewrapSandbox] | type[PlainSandbox]] = {
    "bubblewrap": BubblewrapSandbox,
    "plain": PlainSandbox,
}


def make_sandbox(name: str = DEFAULT_SANDBOX) -> Sandbox:
    """The sandbox of that name, and never another; `SandboxUnavailableError` if it cannot run."""
    check_sandbox(name)
    return SANDBOXES[name]()


def check_sandbox(name: str = DEFAULT_SANDBOX) -> None:
    """Raises `SandboxUnavailableError` if this machine cannot run the sandbox of that name."""
    if name not in SANDBOXES:
        raise UnknownNameError("sandbox", name, SANDBOXES)
    try:
        if name == "bubblewrap":
            check_bubblewrap()
    except SandboxUnavailableError as error:
        raise SandboxUnavailableError(
            f"{error}. Nothing weaker is used in its place; a plain subprocess with limits has to "
            "be asked for by name: sandbox = 'plain'"
        ) from error


def describe_sandbox() -> tuple[str, str | None]:
    """For the doctor: which sandbox programs run in here, and what to do if there is none."""
    try:
        check_bubblewrap()
    except SandboxUnavailableError as error:
        return "missing", f"{error}; a plain subprocess is used only if asked for by name"
    counted = "cgroups" if writable_parent() is not None else "a watch over the process tree"
    return f"bubblewrap {bubblewrap_version()}, memory by {counted}", None


class SandboxPool:
    """Runs programs in sandboxes of one kind.

    Args:
        sandbox: Its name, or a function that makes one.
        workers: How many programs, or pairs of a program and its tests, run at the same time;
            by default one per core.
        breaker_failures: After this many failures of sandboxes in a row the breaker opens,
        breaker_s: for this long.
        queue_s: How long a request may wait for its turn.
    """

    def __init__(
        self,
        sandbox: str | Callable[[], Sandbox] = DEFAULT_SANDBOX,
        *,
        workers: int | None = None,
        breaker_failures: int = 6,
        breaker_s: float = 30.0,
        queue_s: float = QUEUE_S,
    ) -> None:
        workers = workers if workers is not None else os.cpu_count() or 1
        if workers < 1:
            raise ConfigError(f"SandboxPool(workers={workers}): must be at least 1")
        if isinstance(sandbox, str):
            make_sandbox(sandbox)  # refuses here what could never run
        self.workers = workers
        self._make: Callable[[], Sandbox] = (
            (lambda: make_sandbox(sandbox)) if isinstance(sandbox, str) else sandbox
        )
        self.breaker_failures, self.breaker_s, self.queue_s = breaker_failures, breaker_s, queue_s
        self._state = threading.Condition()
        self._idle: dict[Role, list[Sandbox]] = {"program": [], "judge": []}
        self._leased: set[Sandbox] = set()
        self._running = 0
        self._alone_waiting, self._alone_running = 0, False
        self._since_alone = 0
        """How many were let in since one last ran alone: those that want to take turns."""
        self._failures = 0
        self._open_until = 0.0
        self._closed = False
        self.replaced = 0
        """How many sandboxes have failed and were replaced."""
        self._pid = os.getpid()
        atexit.register(self.close)

    def run(
        self,
        files: Mapping[str, bytes],
        command: Sequence[str],
        stdin: bytes = b"",
        limits: Limits | None = None,
        *,
        role: Role = "program",
        alone: bool = False,
    ) -> RunResult:
        """Runs one program, when its turn comes; with `alone`, while no other runs here."""
        return self.attempt(
            lambda boxes: boxes[0].run(files, command, stdin, limits), (role,), alone=alone
        )

    def attempt(
        self,
        work: Callable[[Sequence[Sandbox]], T],
        roles: Sequence[Role] = ("program",),
        *,
        alone: bool = False,
    ) -> T:
        """`work` with a sandbox of each role; once more, with others, if one of them fails."""
        try:
            with self.lease(roles, alone=alone) as leased:
                return work(leased)
        except SandboxError:
            if self._is_open():
                raise
        with self.lease(roles, alone=alone) as leased:
            return work(leased)

    @contextmanager
    def lease(
        self, roles: Sequence[Role] = ("program",), *, alone: bool = False
    ) -> Iterator[Sequence[Sandbox]]:
        """Sandboxes for the caller alone. A `SandboxError` inside counts against the breaker, and
        none of them is used again."""
        self._enter(alone)
        taken: list[tuple[Role, Sandbox]] = []
        try:
            for role in roles:
                taken.append((role, self._take(role)))
            for _, sandbox in taken:
                sandbox.start()
            yield [sandbox for _, sandbox in taken]
        except BaseException as error:
            self._give_back(taken, error)
            raise
        else:
            self._give_back(taken)

    def close(self) -> None:
        """Ends every sandbox, also those that run something. Safe to call again."""
        if os.getpid() != self._pid:  # a fork's copy: the sandboxes are its parent's
            return
        with self._state:
            self._closed = True
            sandboxes = [*self._idle["program"], *self._idle["judge"], *self._leased]
            for idle in self._idle.values():
                idle.clear()
            self._state.notify_all()
        atexit.unregister(self.close)
        for sandbox in sandboxes:
            sandbox.close()

    def _is_open(self) -> bool:
        with self._state:
            return self._closed or time.monotonic() < self._open_until

    def _enter(self, alone: bool) -> None:
        deadline = time.monotonic() + self.queue_s
        with self._state:
            self._alone_waiting += alone
            try:
                while not self._may_enter(alone):
                    if not self._state.wait(deadline - time.monotonic()):
                        raise DeadlineError("its turn", "the pool of sandboxes", self.queue_s)
            finally:
                self._alone_waiting -= alone
                self._state.notify_all()
            self._running += 1
            self._alone_running = alone
            self._since_alone = 0 if alone else self._since_alone + 1

    def _may_enter(self, alone: bool) -> bool:
        if self._closed:
            raise SandboxError("the pool of sandboxes is closed")
        pause_s = self._open_until - time.monotonic()
        if pause_s > 0:
            raise SandboxError(
                f"{self._failures} sandboxes failed one after another; none is started "
                f"for the next {pause_s:.0f} s. `ludic doctor` says what is wrong with them"
            )
        if alone:
            return self._running == 0
        in_turn = not self._alone_waiting or self._since_alone < self.workers
        return self._running < self.workers and not self._alone_running and in_turn

    def _take(self, role: Role) -> Sandbox:
        with self._state:
            sandbox = self._idle[role].pop() if self._idle[role] else None
        sandbox = sandbox or self._make()
        with self._state:
            self._leased.add(sandbox)
        return sandbox

    def _give_back(
        self, taken: Sequence[tuple[Role, Sandbox]], error: BaseException | None = None
    ) -> None:
        unused: list[Sandbox] = []
        with self._state:
            self._running -= 1
            self._alone_running = False
            self._leased.difference_update(sandbox for _, sandbox in taken)
            if error is None:
                self._failures = 0
            elif isinstance(error, SandboxError):
                self._failures += 1
                self.replaced += len(taken)
                if self._failures >= self.breaker_failures:
                    self._open_until = time.monotonic() + self.breaker_s
            for role, sandbox in taken:
                if error is None and not self._closed and len(self._idle[role]) < self.workers:
                    self._idle[role].append(sandbox)
                else:
                    unused.append(sandbox)
            self._state.notify_all()
        for sandbox in unused:
            sandbox.close()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_shared: dict[tuple[int, str, int | None, float], SandboxPool] = {}
_sharing = threading.Lock()


def shared_pool(
    sandbox: str = DEFAULT_SANDBOX, workers: int | None = None, queue_s: float = QUEUE_S
) -> SandboxPool:
    """The pool that all of this process with the same wishes use. A process that was forked has its
    own, since sandboxes are the processes of whoever started them."""
    key = (os.getpid(), sandbox, workers, queue_s)
    with _sharing:
        if key not in _shared:
            _shared[key] = SandboxPool(sandbox, workers=workers, queue_s=queue_s)
        return _shared[key]
