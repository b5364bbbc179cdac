"""A game's values, read from the memory through its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ludic.envs.gameboy.description import Field, Game

Read: TypeAlias = Callable[[int, int], Sequence[int]]
"""Bytes at an address, so many."""
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
