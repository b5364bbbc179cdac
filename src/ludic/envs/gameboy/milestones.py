"""What an episode earned: each milestone of a game, against what the episode began with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.envs.gameboy.description import Game, Milestone
from ludic.envs.gameboy.memory import Values


class Progress:
    """The milestones of one episode."""

    def __init__(self, game: Game, values: Values) -> None:
        self._milestones = game.milestones
        self._seen: dict[str, set[Any]] = {}
        self._best: dict[str, float] = {}
        self.update(values)

    def update(self, values: Values) -> dict[str, float]:
        """What is newly reached, and the rewards for it."""
        gains = {name: self._gain(name, m, values) for name, m in self._milestones.items()}
        return {name: gain * self._milestones[name].reward for name, gain in gains.items() if gain}

    def _gain(self, name: str, milestone: Milestone, values: Values) -> float:
        found = _found(milestone.field, values)
        if milestone.kind == "gain":
            total = float(sum(found))
            gain = max(0.0, total - self._best.get(name, total))
            self._best[name] = max(total, self._best.get(name, total))
            return gain
        if milestone.kind == "flag":
            found = [value for value in found if value == milestone.name]
        fresh = set(found) - self._seen.get(name, set())
        self._seen.setdefault(name, set()).update(fresh)
        return float(len(fresh))


def _found(field: str, values: Values) -> list[Any]:
    """All values of a field: the bits that are set, or those of every entry of a list."""
    first, _, part = field.partition(".")
    value = values[first]
    entries = value if isinstance(value, list) else [value]
    if not part:
        return entries
    parts = [entry[part] for entry in entries if isinstance(entry, Mapping)]
    return [v for value in parts for v in (value if isinstance(value, list) else [value])]
