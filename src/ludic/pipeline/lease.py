"""One trainer holds a run, by a lease that a thread renews."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ludic.errors import ConfigError, PipelineError
from ludic.pipeline.store import EmptiedError, LostRunError, PipelineConfig, Store

_log = logging.getLogger("ludic.pipeline")

COSTS = {
    "everysec": "a crash of the machine that Redis runs on can cost about a second of what it "
    "confirmed: set `appendfsync always` for the full guarantee",
    "no": "a crash of the machine that Redis runs on can cost what the system had not written: "
    "set `appendfsync always` for the full guarantee",
    "off": "Redis keeps no append-only file, so that its end can cost everything since its last "
    "snapshot: set `appendonly yes` and `appendfsync always`",
    "unknown": "Redis does not say how it keeps its data: the guarantee needs `appendonly yes` "
    "and `appendfsync always`",
}


@dataclass(frozen=True, slots=True)
class Acquired:
    """What a trainer finds: which attempt at the run it is, the number of the next unit, the first
    that is not committed, and every unit from there on, as in `scripts.lua`."""

    attempt: int
    next: int
    low: int
    units: Mapping[int, str]


class TrainerLease:
    """Holds a run for one trainer. Any thread may use it.

    The lease of a trainer that died runs out after `lease_s`; whoever wants the run then waits that
    long, and no longer. A second trainer beside a living one is refused.
    `fingerprint` names the configuration: another one under the same name is refused, too.
    A server that lost its data is taken again, as a new attempt, and told of the policy; `emptied`
    counts that. Attempts up to `attempt_floor` were before, whatever the server knows of them.
    """

    def __init__(
        self,
        config: PipelineConfig,
        *,
        lease_s: float = 15.0,
        fingerprint: str = "",
        max_bytes: int = 2**30,
    ) -> None:
        if not lease_s > 0:
            raise ConfigError(f"lease_s={lease_s}: must be > 0")
        self.config, self.lease_s = config, lease_s
        self.store = Store(config)
        self.durability = "unknown"
        self.version: int | None = None  # of the newest policy, announced or on its way
        self.serial = 0
        self.emptied = 0
        self.attempt_floor = 0
        self.facts: list[Callable[[], Mapping[str, Any]]] = []
        self._fingerprint, self._max_bytes = fingerprint, max_bytes
        self._token = secrets.token_hex(16)
        self._acquired: Acquired | None = None
        self._acquiring = threading.RLock()
        self._policy: Mapping[str, Any] | None = None
        self._ended = threading.Event()
        self._lost: LostRunError | None = None
        self._thread: threading.Thread | None = None

    @property
    def attempt(self) -> int:
        return self.acquired.attempt

    @property
    def last_attempt(self) -> int:
        """The newest attempt that this trainer knows of."""
        return max(self.attempt_floor, 0 if self._acquired is None else self._acquired.attempt)

    @property
    def acquired(self) -> Acquired:
        if self._acquired is None:
            raise PipelineError("this trainer has not acquired its run")
        return self._acquired

    def acquire(self) -> Acquired:
        """Takes the run, once. Waits for the lease of a trainer that died."""
        with self._acquiring:
            if not self._is_held:
                self._acquired = self._take()
            if self._thread is None:
                self.durability = self.store.durability()
                if cost := COSTS.get(self.durability):
                    _log.warning("%s", cost)
                if policy := self.store.eviction():
                    _log.warning(
                        "Redis drops keys when its memory is full (maxmemory-policy %s), and a run "
                        "that loses one waits in vain: set `maxmemory-policy noeviction`",
                        policy,
                    )
                self._thread = threading.Thread(
                    target=self._renew, name="ludic-trainer-lease", daemon=True
                )
                self._thread.start()
            return self.acquired

    @property
    def _is_held(self) -> bool:
        return self._acquired is not None and self._acquired.attempt > self.attempt_floor

    async def acquire_async(self) -> Acquired:
        """`acquire` for coroutines."""
        if self._is_held:
            return self.acquired
        return await asyncio.to_thread(self.acquire)

    def _take(self) -> Acquired:
        lease_ms = int(self.lease_s * 1000)
        here = f"{socket.gethostname()}, process {os.getpid()}"
        began, lease_left = time.monotonic(), None
        while True:
            answer = self.store.run(
                *("open", self._token, lease_ms, here, self._fingerprint, self._max_bytes),
                self.attempt_floor,
            )
            match answer[0]:
                case b"ok":
                    flat = answer[4]
                    units = {int(n): u.decode() for n, u in zip(flat[::2], flat[1::2], strict=True)}
                    return Acquired(int(answer[1]), int(answer[2]), int(answer[3]), units)
                case b"other":
                    raise PipelineError(
                        f"{self.config.shown} has another run under the name "
                        f"{self.config.run!r}: choose another name (pipeline.name), or resume "
                        "that run"
                    )
            whom, left_ms = answer[1].decode(), int(answer[2])
            if lease_left is None:
                lease_left = left_ms / 1000
                _log.warning("waiting up to %.3g s for the lease of %s", lease_left, whom)
            # One that is renewed while we wait is that of a living trainer.
            if time.monotonic() - began > lease_left + 1.0:
                raise PipelineError(
                    f"the run {self.config.run!r} on {self.config.shown} has a trainer already: "
                    f"{whom}. One run has one trainer; end that one first, or choose another name "
                    "(pipeline.name)"
                )
            time.sleep(min(0.2, self.lease_s / 10))

    def run(self, script: str, *args: Any, patience_s: float | None = None) -> Any:
        """Runs a script that only the trainer may run."""
        while True:
            if self._lost is not None:
                raise self._lost
            attempt = self.attempt
            guard = (self._token, attempt, int(self.lease_s * 1000))
            try:
                return self.store.run(script, *guard, *args, patience_s=patience_s)
            except EmptiedError as exc:
                self._begin_again(attempt, str(exc))

    def _begin_again(self, attempt: int, why: str) -> None:
        """Takes the run on a server that has forgotten it; one thread does, others follow."""
        with self._acquiring:
            if self._lost is not None or self.attempt != attempt:
                return
            self.attempt_floor = attempt
            self._acquired = self._take()
            self.emptied += 1
            _log.warning(
                "%s: attempt %d goes on from the trainer's own books, and asks again for every "
                "unit that is not settled",
                *(why, self.attempt),
            )
            if self._policy is not None:
                self._announce(self._policy)

    async def run_async(self, script: str, *args: Any, patience_s: float | None = None) -> Any:
        """`run` for coroutines."""
        return await asyncio.to_thread(self.run, script, *args, patience_s=patience_s)

    def expect(self, version: int) -> None:
        """Hears that policy `version` is on its way: from now on it is what ages are counted from,
        and what units that must not be old wait for."""
        with self._acquiring:
            self.version = version

    def announce(self, version: int, **facts: Any) -> int:
        """Tells the actors of a new policy; returns its serial number."""
        with self._acquiring:  # so that no older one is announced after it
            self._policy = {"version": version, **facts}
            self._announce(self._policy)
            self.version = max(version, version if self.version is None else self.version)
            return self.serial

    def _announce(self, policy: Mapping[str, Any]) -> None:
        attempt = None
        while attempt != self.attempt:  # it changes if the server has just lost its data
            attempt = self.attempt
            announced = json.dumps({"attempt": attempt, **policy})
            self.serial = int(self.run("announce", announced, self.serial)[1])

    def _renew(self) -> None:
        while not self._ended.wait(self.lease_s / 4):
            try:
                self._tell_facts()
            except LostRunError as exc:
                self._lost = exc
                _log.error("%s", exc)
                return
            except PipelineError as exc:
                _log.warning("the trainer's lease was not renewed: %s", exc)

    def _tell_facts(self) -> None:
        facts = {name: fact for say in self.facts for name, fact in say().items()}
        self.run("renew", json.dumps(facts), patience_s=self.lease_s / 4)

    def close(self, ended: str | None = None) -> None:
        """Gives the run up. `ended` tells the actors that no more work will come, and why."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self.lease_s)
        if self._acquired is not None and self._lost is None:
            try:
                if ended is not None:
                    self.run("end", ended, patience_s=self.config.call_s)
                self.store.run("close", self._token, patience_s=self.config.call_s)
            except PipelineError as exc:
                _log.warning("the run's lease was not given up, and runs out by itself: %s", exc)
        self._acquired = None
        self.store.close()
