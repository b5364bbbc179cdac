"""An actor: takes units, runs their episodes, and appends finished groups to the stream."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ludic.errors import (
    ConfigError,
    PipelineError,
    RolloutError,
    SchemaVersionError,
    SerializationError,
)
from ludic.inference.client import ChatClient
from ludic.pipeline.messages import Group, Times, Unit, group_message, read_unit
from ludic.pipeline.policies import AmbiguousVersionError, StoredPolicy, stamped
from ludic.pipeline.policy_follower import PolicyFollower
from ludic.pipeline.store import NoAnswerError, PipelineConfig, RefusedError, Store, entries
from ludic.plumbing.text import error_text
from ludic.rollouts.engine import RolloutEngine
from ludic.rollouts.episode_runner import failed_episode
from ludic.rollouts.requests import RolloutRequest, plan_episodes
from ludic.workers.deadlines import ended

_log = logging.getLogger("ludic.pipeline")

Accepts = Callable[[RolloutRequest], str | None]
"""Says why a request is refused; None if it is not."""

_POLL_S = (0.02, 0.3)
_SLOWER = 1.05  # so that no pause is longer than a twentieth of the wait so far
_TAKE = 32
_MOST_FAILED, _MOST_OF_A_UNIT = 32, 4
"""An actor ends after this many episodes that all failed, of which each unit gives at most so many:
it takes eight units in a row or more."""


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """`concurrency` is how many episodes run at once. `lease_s` is how long a unit stays this
    actor's without a heartbeat. `name` must differ between actors; None: made up. One that is told
    to stop waits for a Redis that does not answer for `stop_s` at most. Policies that it fetches
    by HTTP are passed on to other hosts from `policy_address`. A unit waits for its policy for
    `policy_s` at most: the publish under way, its own (600 s each by default), and a little."""

    concurrency: int = 64
    lease_s: float = 30.0
    name: str | None = None
    stop_s: float = 5.0
    policy_address: str = "127.0.0.1"
    policy_s: float = 1230.0

    def __post_init__(self) -> None:
        if self.concurrency < 1 or not min(self.lease_s, self.stop_s, self.policy_s) > 0:
            raise ConfigError(f"{self}: concurrency >= 1, lease_s, stop_s and policy_s > 0")


@dataclass(slots=True)
class ActorReport:
    """What an actor did. `refused` are groups that were not taken, by the server's word: they were
    there already, another actor has taken the unit over, or nobody asks for it any more."""

    name: str
    groups: int = 0
    episodes: int = 0
    tokens: int = 0
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    why: str = ""


async def run_pipeline_actor(
    pipeline: PipelineConfig,
    engine: RolloutEngine,
    *,
    accepts: Accepts,
    client: ChatClient | None = None,
    cfg: ActorConfig | None = None,
    stop: asyncio.Event | None = None,
) -> ActorReport:
    """Works until the run ends, which nobody samples for any more, or until `stop` is set; then it
    finishes what it has begun.

    Every unit that it takes is run with `engine`, unless `accepts` has an objection: an actor
    builds only what it was set up for, whatever a request says. One that does not fit the run ends
    with a `PipelineError`, and its units go to others. A `client` whose weights come from
    the trainer's files is brought to each new policy while its requests go on; without one, the
    weights are somebody else's concern (vLLM's publisher).
    """
    return await Actor(pipeline, engine, accepts, client, cfg or ActorConfig()).run(
        stop or asyncio.Event()
    )


class Actor:
    """See `run_pipeline_actor`. The event loop owns everything here but `_held` and `_news`, which
    it shares with the thread of the heartbeat: the one under a lock, the other is a tuple that is
    replaced as a whole."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        engine: RolloutEngine,
        accepts: Accepts,
        client: ChatClient | None,
        cfg: ActorConfig,
    ) -> None:
        made_up = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.cfg, self.name = cfg, cfg.name or made_up
        self.report = ActorReport(self.name)
        self._store = Store(pipeline)
        self._engine, self._accepts, self._client = engine, accepts, client
        self._lock = threading.Lock()
        self._held: dict[str, asyncio.Task[None]] = {}
        self._sending: set[str] = set()
        self._episodes: dict[str, int] = {}
        """How many a unit plays at once, by entry, until they are over."""
        self._playing, self._freed = 0, asyncio.Event()
        self._news: tuple[StoredPolicy | None, str] = (None, "")
        self._policies = PolicyFollower(self._store, client, cfg.policy_address, cfg.policy_s)
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._cursor = "0-0"
        self._full = False
        self._failed = 0
        """Episodes that failed since one did not."""

    async def run(self, stop: asyncio.Event) -> ActorReport:
        self._loop = asyncio.get_running_loop()
        heart = threading.Thread(target=self._beat_on, name="ludic-heartbeat", daemon=True)
        hurry = asyncio.create_task(self._hurry(stop))
        try:
            await asyncio.to_thread(self._beat)
            heart.start()
            self.report.why = await self._work(stop)
            if stop.is_set():
                await self._drain()
        except NoAnswerError:
            if not stop.is_set():
                raise
            self.report.why = "it was told to stop, and Redis does not answer"
        finally:
            hurry.cancel()
            self._over.set()
            if heart.is_alive():
                await asyncio.to_thread(heart.join, self.cfg.lease_s)
            await ended(*self._held.values())
            await self._policies.close()
            with suppress(PipelineError):
                call_s = self._store.config.call_s
                await self._store.run_async("leave", self.name, patience_s=call_s)
            self._store.close()
        return self.report

    async def _hurry(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._store.hurry(self.cfg.stop_s)

    async def _work(self, stop: asyncio.Event) -> str:
        """Takes units until there is a reason to stop, which it returns."""
        pause, per_unit = _POLL_S[0], self.cfg.concurrency  # so that the first comes alone
        while True:
            if self._failure is not None:
                raise self._failure
            await asyncio.to_thread(self._listen)  # a heartbeat comes too late for a new policy
            policy, ended = self._news
            if stop.is_set():
                return "it was told to stop"
            if ended:  # what is under way, nobody will train on
                return f"the run has ended: {ended}"
            self._policies.follow(policy)
            room = (self.cfg.concurrency - sum(self._episodes.values())) // per_unit
            taken = await self._take(min(room, _TAKE)) if room > 0 and policy else []
            for entry, number, message in taken:
                unit = self._read(number, message)  # raises for one that others must run
                if isinstance(unit, Unit):
                    asked = sum(request.num_episodes for request in unit.requests)
                    per_unit = self._episodes[entry] = min(asked, self.cfg.concurrency)
                self._begin(entry, unit)
            if taken or self._policies.waiting:
                pause = _POLL_S[0]
            if not taken:
                await self._pause(stop, pause)
                pause = min(pause * _SLOWER, _POLL_S[1])

    async def _pause(self, stop: asyncio.Event, seconds: float) -> None:
        waits = [*self._held.values(), asyncio.ensure_future(stop.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        waits[-1].cancel()

    async def _drain(self) -> None:
        """Waits for what was begun; its own deadlines bound every episode."""
        while self._held and self._failure is None:
            self._policies.follow(self._news[0])
            await asyncio.wait(list(self._held.values()), timeout=_POLL_S[1])
        if self._failure is not None:
            raise self._failure

    # Units

    async def _take(self, count: int) -> list[tuple[str, int, bytes]]:
        answer = await self._store.run_async(
            "take", self.name, count, int(self.cfg.lease_s * 1000), self._cursor
        )
        self._cursor, self._full = answer[0].decode(), bool(answer[3])
        return [taken for taken in entries(answer[1]) if taken[0] not in self._held]

    def _read(self, number: int, message: bytes) -> Unit | Group:
        """The unit to run, or the group that says why it is refused."""
        try:
            unit = read_unit(message)
        except SchemaVersionError:
            raise  # it stays in the stream, for an actor that can read it
        except SerializationError as exc:
            return Group(number, (), self.name, f"the request is damaged: {exc}")
        for request in unit.requests:
            if (why := self._accepts(request)) is not None:
                raise PipelineError(
                    f"this actor cannot work for the run {self._store.config.run!r}, and leaves "
                    f"its units to others: unit {number} is refused, because {why}. Start it with "
                    "the run file that the trainer has"
                )
        return unit

    def _begin(self, entry: str, unit: Unit | Group) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(entry, unit))
        with self._lock:
            self._held[entry] = task

        def done(task: asyncio.Task[None]) -> None:
            with self._lock:
                self._held.pop(entry, None)
            self._sending.discard(entry)
            self._episodes.pop(entry, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failure = self._failure or error

        task.add_done_callback(done)

    async def _carry_out(self, entry: str, unit: Unit | Group) -> None:
        group = unit if isinstance(unit, Group) else await self._play(unit, self._episodes[entry])
        self._sending.add(entry)
        self._episodes.pop(entry, None)
        group, size, word = await asyncio.to_thread(self._send, entry, unit, group)
        if word != "ok":
            self.report.refused[word] += 1
            _log.info("unit %d: its group is refused (%s)", group.number, word)
            return
        self.report.groups += 1
        self.report.episodes += len({rollout.episode_id for rollout in group.rollouts})
        self.report.tokens += sum(rollout.num_tokens for rollout in group.rollouts)
        self.report.bytes += size
        if isinstance(unit, Unit):
            self._check_failures(unit, group)

    def _check_failures(self, unit: Unit, group: Group) -> None:
        """Raises where nothing succeeds here. The trainer judges the run; but on a machine that is
        broken episodes fail fast, and it would take most units from those that work."""
        errors = [rollout.error for rollout in group.rollouts if rollout.error is not None]
        failed = len(errors) == len(group.rollouts)
        self._failed = self._failed + min(len(errors), _MOST_OF_A_UNIT) if failed else 0
        if self._failed >= _MOST_FAILED:
            raise RolloutError(
                f"all episodes of the last units that {self.name!r} played have failed, those of "
                f"unit {unit.number} with: {errors[0]}. Its units go to other actors"
            )

    async def _play(self, unit: Unit, at_once: int) -> Group:
        """Samples the unit when there is room: its size is seen only when it is taken. The
        deadlines of the episodes that play bound the wait."""
        while self._playing + at_once > self.cfg.concurrency:
            self._freed.clear()
            await self._freed.wait()
        self._playing += at_once
        try:
            return await self._sample(unit, at_once)
        finally:
            self._playing -= at_once
            self._freed.set()

    async def _sample(self, unit: Unit, at_once: int) -> Group:
        while True:
            asked = time.monotonic()
            first = (await self._policies.enough_for(unit)).serial
            began, loaded_s = time.monotonic(), self._policies.loaded_s
            rollouts = await self._engine.generate_rollouts(
                unit.requests, unit.max_steps, at_once, prefix=unit.prefix, judged=False
            )
            try:
                marked = stamped(
                    rollouts, self._policies.since(first), by_serial=self._client is not None
                )
            except AmbiguousVersionError as exc:
                _log.warning("unit %d is run again: %s", unit.number, exc)
                continue
            times = Times(began - asked, time.monotonic() - began, loaded_s)
            return Group(unit.number, tuple(marked), self.name, times=times)

    def _send(self, entry: str, unit: Unit | Group, group: Group) -> tuple[Group, int, str]:
        """Appends the group. What cannot be encoded, or what Redis refuses, has failed, like an
        episode that raised: the next actor would get no further with it. It costs its episode; a
        group that cannot be sent only as a whole costs all of them."""
        refusal: RefusedError | None = None
        try:
            return self._append(entry, group)
        except Exception as exc:
            if isinstance(unit, Group) or _has_other_trouble(exc):
                raise
            refusal = exc if isinstance(exc, RefusedError) else None
        planned = plan_episodes(unit.requests, seed=self._engine.seed, prefix=unit.prefix)
        parts = {e.id: [r for r in group.rollouts if r.episode_id == e.id] for e in planned}
        for episodes in (*((episode,) for episode in planned), planned):
            group = replace(group, rollouts=tuple(r for e in episodes for r in parts[e.id]))
            try:
                if refusal is not None:  # of the whole: it would be refused once more
                    raise refusal
                if episodes is planned:
                    return self._append(entry, group)
                group_message(group)
            except Exception as exc:
                if _has_other_trouble(exc):
                    raise
                why = f"what it recorded cannot be sent: {error_text(exc)}"
                parts |= {e.id: failed_episode(e, unit.max_steps, why) for e in episodes}
        rollouts = tuple(r for part in parts.values() for r in part)
        return self._append(entry, replace(group, rollouts=rollouts))

    def _append(self, entry: str, group: Group) -> tuple[Group, int, str]:
        """The group as it was sent, its bytes, and what Redis says to it."""
        message = group_message(group)
        tokens = sum(rollout.num_tokens for rollout in group.rollouts)
        word = self._store.run("append", self.name, entry, group.number, message, tokens)
        return group, len(message), word.decode()

    def _give_up(self, lost: list[str]) -> None:
        """Ends the work on units that are not ours any more; one that is being sent is refused by
        the server, if it is not ours."""
        for entry in lost:
            task = self._held.get(entry)
            if task is not None and entry not in self._sending and task.cancel():
                self.report.refused["taken over"] += 1
                _log.warning("a unit was given to another actor meanwhile: it is given up here")

    # Heartbeat

    def _listen(self) -> None:
        with suppress(NoAnswerError):  # whatever else is asked of the server says so
            answer = self._store.run("news", patience_s=self.cfg.lease_s / 4)
            self._hear(answer[0], answer[1])

    def _hear(self, announced: bytes, ended: bytes) -> None:
        policy = StoredPolicy.read(announced) if announced else None  # before the first
        self._news = (policy, ended.decode())

    def _beat_on(self) -> None:
        """In its own thread, so that an environment that blocks the loop loses no lease."""
        while not self._over.wait(min(self.cfg.lease_s / 4, 0.5)):
            try:
                self._beat(patience_s=self.cfg.lease_s / 4)
            except PipelineError as exc:
                _log.debug("no heartbeat: %s", exc)

    def _beat(self, patience_s: float | None = None) -> None:
        with self._lock:
            held = list(self._held)
        newest = self._policies.newest
        facts = {
            **{k: getattr(self.report, k) for k in ("groups", "episodes", "tokens", "bytes")},
            "busy": len(held),
            "version": None if newest is None else newest.version,
            "waits": "for room" if self._full else "",
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        answer = self._store.run("beat", self.name, json.dumps(facts), *held, patience_s=patience_s)
        self._hear(answer[0], answer[1])
        if lost := [entry.decode() for entry in answer[2]]:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._give_up, lost)


def only(requests: Iterable[RolloutRequest]) -> Accepts:
    """Accepts requests for exactly the environments and protocols of these, with the arguments
    that these have; seeds, labels and sampling settings may differ."""
    own = [(request.env, request.protocol) for request in requests]

    def accepts(request: RolloutRequest) -> str | None:
        if (request.env, request.protocol) in own:
            return None
        return (
            f"it asks for environment {request.env.kind!r} under protocol "
            f"{request.protocol.kind!r}, which this actor's run does not name in that form"
        )

    return accepts


def _has_other_trouble(error: Exception) -> bool:
    """Whether Redis could not take a group for a reason that lies in no record of it."""
    return isinstance(error, PipelineError) and not isinstance(error, RefusedError)
