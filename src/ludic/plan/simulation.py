"""Plays the updates of a run event by event: episodes, servers that batch continuously, a trainer.

A server's rows all advance by one token a step, and a step's time is linear in the tokens that its
rows keep; so between two events its progress is a quadratic function of time, and nothing has to
happen at each token. The same setup and seed give the same events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from itertools import count
from math import inf, sqrt
from typing import Any

import numpy as np

from ludic.plan.workload import Result, Setup
from ludic.seeding import derive_seed

_SAME = 1e-6
"""Steps within which two rows end together."""
_DOWN = 1 << 30
"""The load of a server that is starting again."""


class _Server:
    __slots__ = ("at", "cached", "ends", "load", "rows", "stamp", "steps", "wait")

    def __init__(self) -> None:
        self.rows, self.cached, self.steps = 0, 0.0, 0.0
        self.at = 0.0  # up to when its progress is computed; later than now while it stands still
        self.ends: list[tuple[float, int]] = []
        self.wait: deque[int] = deque()
        self.load, self.stamp = 0, 0


class _Simulation:
    def __init__(self, setup: Setup, traced: bool) -> None:
        self.setup, self.work, self.traced = setup, setup.workload, traced
        self.result, self.now = Result(), 0.0
        self.queue: list[tuple[float, int, str, Any, float]] = []
        self.numbers = count()
        self.servers = [_Server() for _ in range(setup.servers)]
        self.loads = [(0, i) for i in range(setup.servers)]
        self.dirty: set[int] = set()
        self.own, self.hosts = 0.0, [0.0] * max(setup.hosts, 1)
        self.lengths: list[int] = []
        self.waits: list[float] = []
        self.turn: list[int] = []
        self.tokens: list[int] = []
        self.version_of: list[int] = []
        self.left_in_group: list[int] = []
        self.done_of_batch: dict[int, int] = {}
        self.trained_groups: set[int] = set()
        self.ready: deque[int] = deque()
        self.version = self.taken = 0
        self.done = 0  # updates; the version is what servers have of them
        self.idle_since: float | None = 0.0
        self.since_checkpoint = 0.0
        self.ended_at: list[float] = []
        self.parts: list[tuple[float, float]] = []
        self.lags: list[int] = []
        self.longest: list[float] = []
        self.chance = np.random.default_rng(derive_seed(setup.seed, "failures"))

    def run(self) -> Result:
        self.start_allowed()
        if self.setup.server_failures_per_hour > 0:
            self.plan_failure()
        while self.done < self.work.updates:
            self.settle()
            self.now, _, kind, what, caused = heappop(self.queue)
            if self.traced:
                self.result.trace.append((caused, self.now, kind))
            getattr(self, f"on_{kind}")(what)
        return self.summed()

    def push(self, when: float, kind: str, what: Any = None) -> None:
        heappush(self.queue, (when, next(self.numbers), kind, what, self.now))

    # Episodes

    def start_allowed(self) -> None:
        """Starts the episodes that the bound on their age allows."""
        setup, size = self.setup, self.work.episodes
        batches = self.version + 1 + setup.lag
        if setup.ahead:
            batches = min(batches, self.taken + 1)
        started = max(batches * size - len(self.turn), 0)
        self.hold(started * (setup.own_episode_s + setup.host_episode_s / len(self.hosts)))
        for episode in range(len(self.turn), batches * size):
            if episode % size == 0:
                self.draw(episode // size)
            self.turn.append(0)
            self.tokens.append(0)
            self.version_of.append(self.version)
            self.own = max(self.now, self.own) + setup.own_episode_s
            begin = max(self.own, self.hosts[0]) + setup.host_episode_s
            heapreplace(self.hosts, begin)
            self.push(begin, "begin", episode)

    def on_begin(self, episode: int) -> None:
        """The first prompt is there."""
        self.version_of[episode] = self.version
        self.submit(episode)

    def draw(self, batch: int) -> None:
        """Draws a batch's lengths and waits, which do not depend on the order of events."""
        rng = np.random.default_rng(derive_seed(self.setup.seed, "batch", batch))
        turns = self.work.episodes * self.work.turns
        self.lengths += self.work.lengths.draw(rng, turns)
        self.waits += self.work.waits(rng, turns)
        self.left_in_group += [self.work.group] * (self.work.episodes // self.work.group)

    def submit(self, episode: int) -> None:
        """To the server with the fewest episodes."""
        while True:
            load, index = self.loads[0]
            if load == self.servers[index].load:
                break
            heappop(self.loads)
        server = self.servers[index]
        server.load += 1
        heapreplace(self.loads, (server.load, index))
        if server.rows < self.setup.slots and not server.wait:
            self.admit(server, index, episode)
        else:
            server.wait.append(episode)

    def admit(self, server: _Server, index: int, episode: int) -> None:
        self.advance(server)
        work, turn = self.work, self.turn[episode]
        prompt = work.observation if turn else work.prompt / work.group
        begun = prompt * self.setup.prompt_s + self.setup.request_s
        server.at = max(server.at, self.now) + begun
        server.rows += 1
        server.cached += self.context(episode)
        length = self.lengths[episode * work.turns + turn]
        heappush(server.ends, (server.steps + length, episode))
        self.dirty.add(index)

    def context(self, episode: int) -> float:
        work = self.work
        return work.prompt + self.tokens[episode] + self.turn[episode] * work.observation

    # Servers

    def advance(self, server: _Server) -> None:
        """Brings a server's progress up to now."""
        elapsed = self.now - server.at
        if elapsed <= 0:
            return
        if server.rows:
            step, grows = self.step_of(server)
            steps = 2 * elapsed / (step + sqrt(step * step + 2 * grows * elapsed))
            self.step(server, steps)
        server.at = self.now

    def step(self, server: _Server, steps: float) -> None:
        server.steps += steps
        server.cached += steps * server.rows

    def step_of(self, server: _Server) -> tuple[float, float]:
        """The time of the next step, and by how much each is longer than the one before."""
        cached_s = self.setup.cached_s
        return self.setup.step_s[server.rows] + cached_s * server.cached, cached_s * server.rows

    def settle(self) -> None:
        """Plans the next end of each server that changed."""
        for index in sorted(self.dirty):
            server = self.servers[index]
            server.stamp += 1
            if server.ends:
                step, grows = self.step_of(server)
                steps = max(server.ends[0][0] - server.steps, 0.0)
                begin = max(server.at, self.now)
                when = begin + steps * step + grows * steps * steps / 2
                self.push(when, "end", (index, server.stamp))
        self.dirty.clear()

    def on_end(self, what: tuple[int, int]) -> None:
        """A completion ends on a server."""
        index, stamp = what
        server = self.servers[index]
        if stamp != server.stamp:
            return
        self.step(server, max(server.ends[0][0] - server.steps, 0.0))
        server.at = self.now
        self.dirty.add(index)
        while server.ends and server.ends[0][0] <= server.steps + _SAME:
            _, episode = heappop(server.ends)
            length = self.lengths[episode * self.work.turns + self.turn[episode]]
            server.rows -= 1
            server.cached = max(server.cached - self.context(episode) - length, 0.0)
            server.load -= 1
            heappush(self.loads, (server.load, index))
            self.tokens[episode] += length
            self.result.sampled += length
            self.finish_turn(episode, length)
        while server.wait and server.rows < self.setup.slots:
            self.admit(server, index, server.wait.popleft())

    def finish_turn(self, episode: int, length: int) -> None:
        """The host reads a completion; the environment steps; a turn or the episode is over."""
        setup = self.setup
        turn = self.turn[episode]
        last = turn + 1 == self.work.turns
        work_s = setup.host_token_s * length + (0.0 if last else setup.host_turn_s)
        read = max(self.now, self.hosts[0]) + work_s
        heapreplace(self.hosts, read)
        self.hold(work_s / len(self.hosts))
        waited = read + self.waits[episode * self.work.turns + turn]
        self.push(waited, "episode" if last else "turn", episode)

    def on_turn(self, episode: int) -> None:
        self.turn[episode] += 1
        self.submit(episode)

    def on_episode(self, episode: int) -> None:
        work = self.work
        group = episode // work.group
        self.left_in_group[group] -= 1
        if self.left_in_group[group] == 0:
            self.ready.append(group)
            batch = group // (work.episodes // work.group)
            self.done_of_batch[batch] = self.done_of_batch.get(batch, 0) + 1
            self.train_if_ready()

    # The trainer

    def next_batch(self) -> Sequence[int] | None:
        """The groups to train on next, if they are there."""
        groups = self.work.episodes // self.work.group
        if self.setup.in_order:
            if self.done_of_batch.get(self.taken, 0) < groups:
                return None
            return range(self.taken * groups, (self.taken + 1) * groups)
        if len(self.ready) < groups:
            return None
        return [self.ready.popleft() for _ in range(groups)]

    def train_if_ready(self) -> None:
        if self.idle_since is None or self.done == self.work.updates:
            return
        if (groups := self.next_batch()) is None:
            return
        setup, work = self.setup, self.work
        episodes = [g * work.group + i for g in groups for i in range(work.group)]
        sampled = sum(self.tokens[e] for e in episodes)
        further = len(episodes) * (work.turns - 1) * work.observation
        longest = max(self.context(e) for e in episodes)
        self.longest.append(longest)
        shared = sampled + further + len(groups) * work.prompt
        computing = setup.train_s(work.trained * shared, longest)
        self.result.trained += sampled
        self.trained_groups.update(groups)
        self.lags += [self.taken - self.version_of[e] for e in episodes]
        self.parts.append((self.now - self.idle_since, computing))
        self.idle_since = None
        self.taken += 1
        busy = computing + setup.intake_token_s * shared + setup.intake_episode_s * len(episodes)
        if setup.checkpoint_every and self.taken % setup.checkpoint_every == 0:
            busy += setup.checkpoint_s
            self.since_checkpoint = 0.0
        if (rate := setup.trainer_failures_per_hour / 3600) > 0:
            for _ in range(int(self.chance.poisson(rate * busy))):
                self.result.failures += 1
                busy += setup.restart_s + self.since_checkpoint
        self.since_checkpoint += computing
        if setup.shared:
            self.stand_still(computing)
        if setup.in_process and setup.ahead:  # the trainer's thread has the interpreter, too
            self.own = max(self.now, self.own) + computing
        self.push(self.now + busy + setup.other_s + setup.publish_s, "published")
        self.start_allowed()

    def on_published(self, _: None) -> None:
        self.done += 1
        self.ended_at.append(self.now)
        self.idle_since = self.now
        if self.setup.arrives_s:
            self.push(self.now + self.setup.arrives_s, "arrived")
        else:
            self.on_arrived(None)
        self.train_if_ready()

    def on_arrived(self, _: None) -> None:
        self.version += 1
        if self.setup.pause_s:
            self.stand_still(self.setup.pause_s)
        self.start_allowed()

    def hold(self, seconds: float) -> None:
        """Where hosts and sampler are one process, each waits for what the other does."""
        if self.setup.in_process and seconds:
            self.stand_still(seconds)

    def stand_still(self, seconds: float) -> None:
        for index, server in enumerate(self.servers):
            self.advance(server)
            server.at = max(server.at, self.now) + seconds
            self.dirty.add(index)

    # Failures

    def plan_failure(self) -> None:
        rate = self.setup.server_failures_per_hour * len(self.servers) / 3600
        self.push(self.now + float(self.chance.exponential(1 / rate)), "failure")

    def on_failure(self, _: None) -> None:
        """A server is lost with its rows: their episodes begin again, on any server."""
        index = int(self.chance.integers(len(self.servers)))
        server = self.servers[index]
        self.plan_failure()
        if server.load >= _DOWN:
            return
        self.result.failures += 1
        self.advance(server)
        rows, waiting = list(server.ends), list(server.wait)
        for end, episode in rows:
            length = self.lengths[episode * self.work.turns + self.turn[episode]]
            made = int(length - (end - server.steps))
            self.result.sampled += made
            self.result.lost += made + self.tokens[episode]
        server.ends, server.rows, server.cached = [], 0, 0.0
        server.wait.clear()
        server.load = _DOWN  # the others come first
        server.at = self.now + self.setup.restart_s
        heappush(self.loads, (server.load, index))
        self.push(server.at, "back", index)
        self.dirty.add(index)
        for _end, episode in rows:
            self.turn[episode] = self.tokens[episode] = 0
            self.version_of[episode] = self.version
        for episode in [episode for _end, episode in rows] + waiting:
            self.submit(episode)

    def on_back(self, index: int) -> None:
        server = self.servers[index]
        server.load -= _DOWN
        heappush(self.loads, (server.load, index))

    # The end

    def summed(self) -> Result:
        setup, result = self.setup, self.result
        first = min(1 + setup.lag, self.work.updates - 1)
        begin = self.ended_at[first - 1] if first else 0.0
        counted = self.parts[first:]
        result.seconds = self.now
        result.update_s = (self.now - begin) / (self.work.updates - first)
        result.wait_s = sum(wait for wait, _ in counted) / len(counted)
        result.train_s = sum(train for _, train in counted) / len(counted)
        result.publish_s = setup.publish_s
        result.unused = sum(
            tokens
            for episode, tokens in enumerate(self.tokens)
            if episode // self.work.group not in self.trained_groups
        )
        result.lag_mean = sum(self.lags) / len(self.lags)
        result.lag_max = max(self.lags)
        result.longest = sum(self.longest) / len(self.longest)
        each = result.trained / len(self.parts)
        result.tokens_per_s = each / result.update_s if result.update_s else inf
        return result


def simulate(setup: Setup, *, traced: bool = False) -> Result:
    """Plays `setup.workload.updates` updates."""
    return _Simulation(setup, traced).run()
