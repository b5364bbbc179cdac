"""How many actors a launched run has: more while the trainer waits for work that nobody has taken,
fewer while finished work piles up."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from ludic.launch import Role, Supervisor
from ludic.pipeline.status import PipelineStatus
from ludic.runs.settings import ClusterSection

HUNGRY_S, FED_S = 1.0, 0.1
"""A trainer that waited longer than the first for a batch is hungry, less than the second, fed."""
GROW_S, SHRINK_S = 10.0, 60.0
"""Between two changes: a new actor needs a while to be of use."""


def wanted(
    now: int, least: int, most: int, *, waited_s: float, untaken: int, finished: int, update: int
) -> int:
    """Returns how many actors there should be. `untaken` units wait for an actor, `finished` groups
    for the trainer, or for the checkpoint after they were trained on; more than `update` of them
    are more than it needs."""
    if waited_s > HUNGRY_S and untaken > 0:
        return max(min(now + 1, most), now)
    if waited_s < FED_S and untaken == 0 and finished >= update:
        return max(now - 1, min(now, least))
    return now


class Elastic:
    """Adds and removes actors, one at a time, on what the trainer said of its last batch."""

    def __init__(self, cluster: ClusterSection, update: int) -> None:
        self._least, self._most = cluster.actors_min, cluster.actors_max or cluster.actors_min
        self._update = update
        self._changed = time.monotonic()
        self._step: object = None

    def adjust(
        self, supervisor: Supervisor, status: PipelineStatus, actor: Callable[[int], Role]
    ) -> None:
        """Changes the number of actors if it is time to."""
        names = supervisor.names("actor")
        since = time.monotonic() - self._changed
        trainer = status.trainer
        step = trainer.get("step")
        if since < GROW_S or step == self._step:
            return
        to = wanted(
            len(names),
            self._least,
            self._most - supervisor.over("actor"),
            waited_s=float(trainer.get("wait_s", 0.0)),
            untaken=status.waiting,
            finished=status.finished,
            update=self._update,
        )
        if to == len(names) or (to < len(names) and since < SHRINK_S):
            return
        if to > len(names) > supervisor.running("actor"):  # those that wait for a place come first
            return
        self._changed, self._step = time.monotonic(), step
        if to < len(names):
            supervisor.remove(names[-1])
        else:
            numbered = (actor(number) for number in count(1))
            supervisor.add(next(role for role in numbered if not supervisor.has(role.name)))
