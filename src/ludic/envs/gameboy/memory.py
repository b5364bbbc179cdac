"""A game's values, read from the memory through its description; and what they earned since
the episode began."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ludic.envs.gameboy.description import Field, Game, Milestone

Read: TypeAlias = Callable[[int, int], Sequence[int]]
"""Returns the bytes at an address; the second number is how many."""
Values: TypeAlias = Mapping[str, Any]


class Reader:
    """Reads all fields of one game."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self._characters = game.text.table()
        self._names = {name: game.table(name) for name in game.names}

    def values(self, read: Read) -> dict[str, Any]:
        """Numbers and names, a list of names for bits, and a list of such values for a list."""
        lists = {name: f for name, f in self.game.fields.items() if f.type == "list"}
        values = {
            name: self._value(field, field.address, read)
            for name, field in self.game.fields.items()
            if name not in lists
        }
        for name, field in lists.items():
            count = values[field.count] if isinstance(field.count, str) else field.count
            values[name] = [
                {
                    part: self._value(below, start + below.address, read)
                    for part, below in field.fields.items()
                }
                for i in range(min(int(count), field.most))
                for start in [field.address + i * field.stride]
            ]
        return values

    def tiles(self, read: Read) -> list[Sequence[int]]:
        """The rows of tiles that are on the screen."""
        screen = self.game.screen
        if screen is None:
            return []
        rows = range(screen.height)
        return [read(screen.address + row * screen.stride, screen.width) for row in rows]

    def screen_text(self, tiles: Sequence[Sequence[int]]) -> list[str]:
        """What can be read on the screen: dialogue and menus."""
        first = self.game.text.first_tile
        rows = (
            "".join(self._characters.get(tile, " ") if tile >= first else " " for tile in row)
            for row in tiles
        )
        return [row.strip() for row in rows if row.strip()]

    def _value(self, field: Field, address: int, read: Read) -> Any:
        if field.type in ("u8", "u16le", "u16be"):
            data = bytes(read(address, 1 if field.type == "u8" else 2))
            number = int.from_bytes(data, "little" if field.type == "u16le" else "big")
            return number if field.names is None else self._word(field.names, number)
        data = bytes(read(address, field.size))
        if field.type == "bcd":
            return sum((b // 16 * 10 + b % 16) * 100**i for i, b in enumerate(reversed(data)))
        if field.type == "bits":
            whole = int.from_bytes(data, "little")
            bits = [bit for bit in range(8 * field.size) if whole >> bit & 1]
            return [str(i) if field.names is None else self._word(field.names, i) for i in bits]
        text = data.partition(bytes([self.game.text.end]))[0]
        return "".join(self._characters.get(code, "?") for code in text)

    def _word(self, table: str, number: int) -> str:
        return self._names[table].get(number, f"{number:#04x}")


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
        entries = _entries(milestone.field, values)
        if milestone.kind == "gain":
            total = float(sum(entries))
            gain = max(0.0, total - self._best.get(name, total))
            self._best[name] = max(total, self._best.get(name, total))
            return gain
        if milestone.kind == "flag":
            entries = [entry for entry in entries if entry == milestone.name]
        fresh = set(entries) - self._seen.get(name, set())
        self._seen.setdefault(name, set()).update(fresh)
        return float(len(fresh))


def _entries(field: str, values: Values) -> list[Any]:
    """All values of a field: the bits that are set, or those of every entry of a list."""
    first, _, part = field.partition(".")
    value = values[first]
    entries = value if isinstance(value, list) else [value]
    if not part:
        return entries
    parts = [entry[part] for entry in entries if isinstance(entry, Mapping)]
    return [v for value in parts for v in (value if isinstance(value, list) else [value])]
