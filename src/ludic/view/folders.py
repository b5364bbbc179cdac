"""Which runs there are below the given folders, and which files of them may be read.

Nothing outside the given folders is read: a path that leads out of them, by a link or otherwise,
is refused where it is opened, and no request names a path at all.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludic.errors import LudicError

_DEPTH = 4
_MARKS = ("run.json", "metrics.jsonl")
_LARGEST_JSON = 64 << 20
_SCAN_S = 2.0
ROLLOUTS = (".jsonl.zst", ".jsonl.gz", ".jsonl")


class ViewError(LudicError):
    """Something that cannot be shown; the message says what, and the page shows it."""


class QueryError(ViewError):
    """A query that makes no sense, whatever the folders hold."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """One run: its name in addresses, its folder, and the given folder that holds it."""

    name: str
    path: Path
    root: Path

    def confined(self, path: Path) -> Path:
        """`path`, all links followed, if it is inside the given folder; else raises `ViewError`."""
        real = path.resolve()
        if not real.is_relative_to(self.root):
            raise ViewError(
                f"{path.name} leads outside the folder that is shown, so it is not read"
            )
        return real

    def read_json(self, name: str) -> Any:
        """A JSON file of the run; None if there is none."""
        path = self.path / name
        if not path.is_file():
            return None
        path = self.confined(path)
        try:
            if path.stat().st_size > _LARGEST_JSON:
                raise ViewError(f"{name} has over {_LARGEST_JSON >> 20} MB and is not read")
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as exc:
            raise ViewError(f"{name} cannot be read: {exc}") from exc

    def rollout_files(self) -> list[Path]:
        """The files of rollouts, those of the reinforcement first."""
        files = _rollouts_in(self.path / "rollouts") + _rollouts_in(self.path)
        return [path for path in files if ".tokens." not in path.name]

    def token_files(self) -> list[Path]:
        """The files with what the trainer made of tokens."""
        return [p for p in _rollouts_in(self.path / "rollouts") if ".tokens." in p.name]

    def reports(self) -> list[str]:
        """The names of the run's evaluations, in the order of the stages."""
        folder = self.path / "eval"
        order = {"before": -2, "after_sft": -1, "after_rl": 1 << 60}
        names = [p.stem for p in _entries(folder) if p.suffix == ".json" and not _hidden(p)]

        def place(name: str) -> tuple[int, str]:
            digits = name.removeprefix("step-")
            return order.get(name, int(digits) if digits.isdecimal() else 1 << 59), name

        return sorted(names, key=place)


@dataclass(slots=True)
class Folders:
    """The given folders. Any thread may ask: a scan replaces the table of runs as a whole."""

    roots: Sequence[Path]
    problems: list[str] = field(default_factory=list)
    _places: dict[str, RunPlace] = field(default_factory=dict)
    _scanned: float = -1e9

    def __post_init__(self) -> None:
        self.roots = [Path(os.path.abspath(root)) for root in self.roots]

    def runs(self) -> dict[str, RunPlace]:
        """The runs by name. Folders are looked through again every few seconds."""
        if time.monotonic() - self._scanned > _SCAN_S:
            self._scan()
        return self._places

    def run(self, name: str) -> RunPlace:
        """The run of that name."""
        place = self._places.get(name) or self.runs().get(name)
        if place is None:
            raise ViewError(f"there is no run {name!r} in the folders that are shown")
        return place

    def _scan(self) -> None:
        places: dict[str, RunPlace] = {}
        problems: list[str] = []
        for root in self.roots:
            if not root.is_dir():
                problems.append(f"{root} is not a folder")
                continue
            before = len(places)
            for path in _runs_below(root.resolve(), problems):
                inside = path.relative_to(root.resolve())
                name = root.name if path == root.resolve() else inside.as_posix()
                number = 2
                unique = name or "run"
                while unique in places:
                    unique, number = f"{name}~{number}", number + 1
                places[unique] = RunPlace(unique, path, root.resolve())
            if len(places) == before:
                problems.append(
                    f"{root} holds no run: a run's folder has a run.json or a metrics.jsonl"
                )
        self._places, self.problems, self._scanned = places, problems, time.monotonic()


def _runs_below(root: Path, problems: list[str]) -> Iterator[Path]:
    """Run folders, without looking into runs for more. Links to folders are not followed."""
    waiting = [(root, 0)]
    while waiting:
        path, depth = waiting.pop(0)
        if _is_run(path):
            yield path
            continue
        if depth == _DEPTH:
            continue
        for entry in _entries(path):
            if _hidden(entry):
                continue
            if entry.is_symlink():
                if entry.is_dir() and _is_run(entry):
                    problems.append(f"{entry.name} is a link to a folder and is not followed")
            elif entry.is_dir():
                waiting.append((entry, depth + 1))


def _is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in _MARKS) or bool(
        _rollouts_in(path / "rollouts") or _rollouts_in(path)
    )


def _rollouts_in(folder: Path) -> list[Path]:
    return [
        path
        for path in _entries(folder)
        if path.name.endswith(ROLLOUTS)
        and not _hidden(path)
        and not path.name.startswith(("superseded-", "metrics.jsonl"))
    ]


def _hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def state_of(run: RunPlace) -> str:
    """running, finished or stopped."""
    try:
        holder = json.loads((run.path / ".lock").read_text(encoding="utf-8")[:4096])
        if holder["host"] == platform.node():
            if Path(f"/proc/{int(holder['pid'])}").exists() or not Path("/proc").exists():
                return "running"
        elif time.time() - (run.path / "metrics.jsonl").stat().st_mtime < 600:
            return "running"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return "finished" if (run.path / "summary.json").is_file() else "stopped"
