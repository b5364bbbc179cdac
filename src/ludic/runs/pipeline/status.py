"""How a run over Redis stands: its trainer, its actors, and what is between them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludic.pipeline.store import Store, counters

SILENT_S = 60.0
"""After this long without a heartbeat an actor counts as gone."""


_SAME = ("attempt", "bytes", "max_bytes", "sent_bytes", "taken_over", "doubles")
_COUNTS = {"total_groups": "finished", "total_tokens": "tokens", **{name: name for name in _SAME}}
"""The counts of a status, by their names on the server."""


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """One actor; ages are by the server's clock."""

    name: str
    age_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.age_s < SILENT_S


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """A moment of a run. `oldest_s` is the age of the oldest unit that is not committed."""

    now_s: float
    actors: tuple[ActorStatus, ...]
    trainer: Mapping[str, Any]
    trainer_alive: bool
    attempt: int
    version: int | None
    waiting: int
    leased: int
    finished: int
    bytes: int
    max_bytes: int
    total_groups: int
    total_tokens: int
    sent_bytes: int
    taken_over: int
    doubles: int
    oldest_s: float
    trained: int
    dropped: Mapping[str, int]
    memory: int
    durability: str
    ended: str

    @property
    def alive(self) -> int:
        return sum(actor.alive for actor in self.actors)

    def rate(self, before: PipelineStatus | None) -> float | None:
        """Groups per second since an earlier status."""
        if before is None or self.now_s <= before.now_s:
            return None
        return (self.total_groups - before.total_groups) / (self.now_s - before.now_s)

    def line(self) -> str:
        """Everything in one line."""
        dropped = ", ".join(f"{n} {reason}" for reason, n in self.dropped.items()) or "none"
        return (
            f"actors {self.alive}, waiting {self.waiting}, sampling {self.leased}, finished "
            f"{self.finished} ({self.bytes / 2**20:.1f} MiB), trained {self.trained}, lag "
            f"{self.trainer.get('lag', '?')}, dropped: {dropped}"
        )


def read_status(store: Store) -> PipelineStatus:
    """Asks the server, once."""
    facts = store.facts()
    meta, now = facts["meta"], facts["now_ms"]
    actors = []
    for name, beat in sorted(facts["actors"].items()):
        at, _, facts_text = beat.partition(" ")
        actors.append(ActorStatus(name, (now - int(at)) / 1000, json.loads(facts_text or "{}")))
    _, _, facts_text = meta.get("trainer", "").partition(" ")
    trainer: dict[str, Any] = json.loads(facts_text) if facts_text else {}
    counted = counters(facts)
    policy = json.loads(meta["policy"])[1] if meta.get("policy") else {}
    entries = [note.split(":")[1] for note in facts["units"].values() if note[:1] in ("q", "d")]
    oldest = min((int(entry.split("-")[0]) for entry in entries), default=now)
    return PipelineStatus(
        now_s=now / 1000,
        actors=tuple(actors),
        trainer=trainer,
        trainer_alive=facts["lease_ms"] > 0,
        version=policy.get("version"),
        waiting=max(facts["requests"] - facts["leased"], 0),
        leased=facts["leased"],
        finished=facts["groups"],
        **{name: int(meta.get(key, 0)) for name, key in _COUNTS.items()},
        oldest_s=(now - oldest) / 1000,
        trained=int(trainer.get("trained", counted.get("trained", 0))),
        dropped=trainer.get("dropped", counted.get("dropped", {})),
        memory=store.memory(),
        durability=str(trainer.get("durability", "?")),
        ended=meta.get("ended", ""),
    )


def status_table(
    status: PipelineStatus, before: PipelineStatus | None = None, *, run: str = ""
) -> Any:
    """Returns it as a table for the terminal. `run` says which part of the run it is in."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    rate = status.rate(before)
    trainer = status.trainer
    if run:
        table.add_row("run", run)
    if not status.attempt:
        table.add_row("trainer", "none has opened the run on this Redis yet")
        return table
    what = "alive" if status.trainer_alive else f"gone{': ' + status.ended if status.ended else ''}"
    table.add_row("trainer", f"{what}, attempt {status.attempt}, version {status.version}")
    table.add_row(
        "updates",
        f"{trainer.get('step', '?')}, lag {trainer.get('lag', '?')}, waited "
        f"{trainer.get('wait_s', '?')} s for the last batch",
    )
    table.add_row(
        "units",
        f"{status.waiting} waiting, {status.leased} being sampled, {status.finished} finished; the "
        f"oldest is {status.oldest_s:.0f} s old",
    )
    table.add_row(
        "groups",
        f"{status.total_groups} in all"
        + (f", {rate:.1f}/s" if rate is not None else "")
        + f", {status.trained} trained, {status.taken_over} taken over, {status.doubles} doubles "
        "refused",
    )
    dropped = ", ".join(f"{n} {reason}" for reason, n in status.dropped.items())
    table.add_row("dropped", dropped or "none")
    table.add_row(
        "redis",
        f"{status.bytes / 2**20:.1f} of {status.max_bytes / 2**20:.0f} MiB in groups, "
        f"{status.memory / 2**20:.1f} MiB in all, appendfsync {status.durability}",
    )
    for actor in status.actors:
        facts = actor.facts
        word = "" if actor.alive else ", gone?"
        table.add_row(
            actor.name,
            f"{facts.get('groups', 0)} groups, {facts.get('tokens', 0)} tokens, "
            f"{facts.get('busy', 0)} under way, version {facts.get('version')}, heard "
            f"{actor.age_s:.1f} s ago{word} {facts.get('waits', '')}".rstrip(),
        )
    return table
