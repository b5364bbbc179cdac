"""What is launched, and what an engine does with it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Role:
    """One command, where it may run, and how often it is started again.

    With several `nodes` or `processes` per node it is a gang: its processes are the ranks of one
    torch world, are placed together, and end together when one of them fails. `cpus` and `gpus` are
    those of a node's share. In the command, `{address}` and `{port}` stand for the node's address
    and a free port there. `variables` are seen by everybody who may look at the engine's records;
    those of the file `secrets` (a JSON object) are read where the command starts. A role with
    `finishes` is over when it ends with status 0; any other is started again.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    kind: str = ""
    nodes: int = 1
    processes: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    restarts: int = 3
    finishes: bool = False
    folder: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Path | None = None

    @property
    def world(self) -> int:
        return self.nodes * self.processes

    @property
    def wants(self) -> str:
        """What it asks for, in words."""
        each = f"{self.cpus:g} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")
        return each if self.nodes == 1 else f"{self.nodes} nodes with {each} each"


@dataclass(frozen=True, slots=True)
class Waiting:
    """It has no place yet, and why; or it has one, and is only being started there."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    """It runs on these nodes."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """It ended: with an exit status, or None if its node was lost; and what it said last."""

    status: int | None
    words: str

    def __str__(self) -> str:
        how = "was lost" if self.status is None else f"ended with status {self.status}"
        return f"{how}: {self.words}"


class Placement(Protocol):
    """A role that was given to an engine. No method waits longer than its `grace_s`, or than an
    engine's own deadline of seconds."""

    def poll(self) -> Waiting | Running | Ended:
        """Returns how it stands."""

    def send(self, sign: signal.Signals) -> None:
        """Sends a signal to its first process."""

    def end(self, grace_s: float) -> None:
        """Ends all its processes, by force after `grace_s`, and frees its place."""


class Engine(Protocol):
    """Finds places for roles, and starts them there."""

    def start(self, role: Role) -> Placement:
        """Begins to place a role. Returns at once."""

    @property
    def gpus(self) -> float:
        """How many GPUs its nodes have in all."""

    def shortage(self, roles: list[Role]) -> str | None:
        """Returns why these roles can never run together on the nodes that there are; None if they
        can."""

    def close(self) -> None:
        """Gives back what the engine itself holds."""
