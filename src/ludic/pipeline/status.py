"""How a run over Redis stands: its processes, and what is between them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludic.pipeline import servers
from ludic.pipeline.store import Store

SILENT_S = 60.0
"""After this long without a heartbeat an actor counts as gone."""


_SAME = ("attempt", "bytes", "max_bytes", "sent_bytes", "taken_over", "doubles")
_COUNTS = {"total_groups": "finished", "total_tokens": "tokens", **{name: name for name in _SAME}}
"""The counts of a status, by their names on the server."""


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """One actor, or one server by its address; ages are by the clock of Redis."""

    name: str
    age_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.age_s < SILENT_S


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """A moment of a run. `oldest_s` is the age of the oldest unit that is not committed. `roles` is
    what a launch has recorded of its processes, by name."""

    now_s: float
    actors: tuple[ActorStatus, ...]
    servers: tuple[ActorStatus, ...]
    roles: Mapping[str, Mapping[str, Any]]
    holder: str
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
        return (
            f"actors {self.alive}, waiting {self.waiting}, sampling {self.leased}, finished "
            f"{self.finished} ({self.bytes / 2**20:.1f} MiB), trained {self.trained}, lag "
            f"{self.trainer.get('lag', '?')}, dropped: {_dropped(self)}"
        )


def read_status(store: Store) -> PipelineStatus:
    """Asks the server, once."""
    facts = store.facts()
    meta, now = facts["meta"], facts["now_ms"]

    def heard(beats: Mapping[str, str]) -> tuple[ActorStatus, ...]:
        parts = [(name, *beat.partition(" ")[::2]) for name, beat in sorted(beats.items())]
        return tuple(
            ActorStatus(name, (now - int(at)) / 1000, json.loads(text or "{}"))
            for name, at, text in parts
        )

    _, _, facts_text = meta.get("trainer", "").partition(" ")
    trainer: dict[str, Any] = json.loads(facts_text or "{}")
    counted = json.loads(meta.get("counters") or "{}")
    policy = json.loads(meta["policy"])[1] if meta.get("policy") else {}
    entries = [note.split(":")[1] for note in facts["units"].values() if note[:1] in ("q", "d")]
    oldest = min((int(entry.split("-")[0]) for entry in entries), default=now)
    return PipelineStatus(
        now_s=now / 1000,
        actors=heard(facts["actors"]),
        servers=heard(facts["servers"]),
        roles={role.name: role.facts for role in heard(facts["roles"])},
        holder=meta.get("holder", ""),
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


COLUMNS = ("role", "node", "state", "restarts", "version", "work", "waits for")


def process_rows(
    status: PipelineStatus, before: PipelineStatus | None = None
) -> list[tuple[str, ...]]:
    """Returns a row of `COLUMNS` for each process of the run: those that say how they are, and
    those that a launch knows of."""
    roles = dict(status.roles)
    rows: list[tuple[str, ...]] = []

    def add(name: str, node: str, state: str, version: Any, work: str, waits: str) -> None:
        role = roles.pop(name, {})
        version = "" if version is None else str(version)
        restarts = str(role.get("restarts", ""))
        rows.append((name, str(role.get("node") or node), state, restarts, version, work, waits))

    trainer, dropped = status.trainer, _dropped(status)
    alive = status.trainer_alive
    gone = f"gone{': ' + status.ended if status.ended else ''}"
    work = f"{trainer.get('step', '?')} updates, {status.trained} groups, dropped: {dropped}"
    if alive and trainer.get("weights_at"):
        work += f", weights at {trainer['weights_at']}"
    add(
        *("trainer", status.holder.partition(",")[0], "alive" if alive else gone),
        *(status.version, work, f"groups, {trainer.get('wait_s', '?')} s for the last batch"),
    )
    serving = [s for s in status.servers if s.age_s < servers.SILENT_S]
    for server in status.servers:
        facts = server.facts
        ready, old = facts.get("version") is not None, facts.get("version") != status.version
        add(
            *(facts.get("name") or server.name, facts.get("host", "")),
            *(_alive(server.age_s, servers.SILENT_S), facts.get("version")),
            f"{facts.get('capacity', '?')} requests at once at {server.name}",
            "a publish" if not ready or old else "",
        )
    rates = _rates(status, before)
    for actor in status.actors:
        facts = actor.facts
        work = f"{facts.get('groups', 0)} groups, {facts.get('busy', 0)} under way, " + (
            f"{rates[actor.name]:.0f} tokens/s"
            if actor.name in rates
            else f"{facts.get('tokens', 0)} tokens"
        )
        waits = str(facts.get("waits", "")).removeprefix("for ")
        idle = "units" if not facts.get("busy") and not status.waiting else ""
        nobody = "a server" if status.servers and not serving else ""
        add(
            *(actor.name, facts.get("host", ""), _alive(actor.age_s, SILENT_S)),
            *(facts.get("version"), work, waits or nobody or idle),
        )
    for name, facts in list(roles.items()):  # of which only the launch has said anything
        add(name, "", str(facts.get("state", "")), None, "", "")
    return rows


def _alive(age_s: float, silent_s: float) -> str:
    return "alive" if age_s < silent_s else f"silent for {age_s:.0f} s"


def _dropped(status: PipelineStatus) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in status.dropped.items()) or "none"


def _rates(status: PipelineStatus, before: PipelineStatus | None) -> dict[str, float]:
    """Tokens a second of each actor since an earlier status."""
    if before is None or status.now_s <= before.now_s:
        return {}
    seconds = status.now_s - before.now_s
    had = {actor.name: actor.facts.get("tokens", 0) for actor in before.actors}
    return {
        actor.name: (actor.facts.get("tokens", 0) - had[actor.name]) / seconds
        for actor in status.actors
        if actor.name in had
    }


def queue_lines(status: PipelineStatus, before: PipelineStatus | None = None) -> dict[str, str]:
    """Returns what is between the processes, by name."""
    rate = status.rate(before)
    return {
        "units": f"{status.waiting} waiting, {status.leased} being sampled, {status.finished} "
        f"finished; the oldest is {status.oldest_s:.0f} s old",
        "groups": f"{status.total_groups} in all"
        + (f", {rate:.1f}/s" if rate is not None else "")
        + f", lag {status.trainer.get('lag', '?')}, {status.taken_over} taken over, "
        f"{status.doubles} doubles refused, attempt {status.attempt}",
        "redis": f"{status.bytes / 2**20:.1f} of {status.max_bytes / 2**20:.0f} MiB in groups, "
        f"{status.memory / 2**20:.1f} MiB in all, appendfsync {status.durability}",
    }


def status_table(
    status: PipelineStatus, before: PipelineStatus | None = None, *, run: str = ""
) -> Any:
    """Returns it as a table for the terminal. `run` says which part of the run it is in."""
    from rich.console import Group
    from rich.table import Table

    lines = Table(box=None, pad_edge=False, show_header=False)
    if run:
        lines.add_row("run", run)
    if not status.attempt:
        lines.add_row("trainer", "none has opened the run on this Redis yet")
    else:
        for name, line in queue_lines(status, before).items():
            lines.add_row(name, line)
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in process_rows(status, before) if status.attempt or status.servers else ():
        table.add_row(*row)
    return Group(lines, table) if table.row_count else lines
