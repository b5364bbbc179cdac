"""The ground of a game: what the screen shows of it, what has been seen of it, and ways over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from ludic.envs.gameboy.description import Grid
from ludic.envs.gameboy.memory import Values

Cell: TypeAlias = tuple[int, int]
"""Column and row of a map; rows count downwards."""

MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
LONGEST_LIST = 256


@dataclass(frozen=True, slots=True)
class View:
    """What is on the screen of a map: a glyph for each cell, which can be walked on, and on which
    of these something lies, such as a door."""

    place: str
    at: Cell
    glyphs: Mapping[Cell, str]
    walkable: frozenset[Cell]
    marked: frozenset[Cell] = frozenset()

    def drawn(self) -> list[str]:
        """Rows with their number in front."""
        rows = sorted({y for _, y in self.glyphs})
        columns = sorted({x for x, _ in self.glyphs})
        width = max(len(str(y)) for y in rows)
        return [
            f"{y:>{width}} " + "".join(self.glyphs.get((x, y), " ") for x in columns) for y in rows
        ]


def look(
    grid: Grid,
    values: Values,
    tiles: Sequence[Sequence[int]],
    read: Callable[[int, int, int | None], Sequence[int]],
) -> View:
    """The part of the map that the screen shows. Cells beyond the map's edge, where numbers are
    negative, are left out."""
    at = (values[grid.x], values[grid.y])
    floor = walkable_tiles(grid, values, read)
    glyphs: dict[Cell, str] = {}
    for row in range(len(tiles) // grid.cell):
        for column in range(len(tiles[0]) // grid.cell):
            cell = (at[0] + column - grid.player[0], at[1] + row - grid.player[1])
            tile = tiles[row * grid.cell + grid.tile[1]][column * grid.cell + grid.tile[0]]
            if min(cell) >= 0:
                glyphs[cell] = "." if tile in floor else "#"
    walkable = {cell for cell, glyph in glyphs.items() if glyph == "."}
    marked: set[Cell] = set()
    for mark in grid.marks:
        for entry in values[mark.list][mark.first :]:
            cell = (entry["x"] - mark.offset, entry["y"] - mark.offset)
            if cell in glyphs and not any(entry[k] == v for k, v in mark.unless.items()):
                glyphs[cell] = mark.glyph
                for cells in (walkable, marked):
                    (cells.add if mark.walkable else cells.discard)(cell)
    glyphs[at] = "@"
    return View(str(values[grid.place]), at, glyphs, frozenset(walkable), frozenset(marked))


def walkable_tiles(
    grid: Grid, values: Values, read: Callable[[int, int, int | None], Sequence[int]]
) -> frozenset[int]:
    """The tiles that can be walked on."""
    if not isinstance(grid.walkable, str):
        return frozenset(grid.walkable)
    listed = bytes(read(values[grid.walkable], LONGEST_LIST, grid.bank))
    return frozenset(listed.partition(b"\xff")[0])


class Ground:
    """All that was seen of the maps."""

    def __init__(self) -> None:
        self._walkable: dict[str, dict[Cell, bool]] = {}
        self._marked: dict[str, set[Cell]] = {}

    def see(self, view: View) -> None:
        """Notes what the screen shows; the last sight of a cell counts."""
        seen = self._walkable.setdefault(view.place, {})
        seen.update((cell, cell in view.walkable) for cell in view.glyphs if cell != view.at)
        seen[view.at] = True
        hidden = self._marked.get(view.place, set()) - view.glyphs.keys()
        self._marked[view.place] = hidden | view.marked

    def way(
        self, place: str, start: Cell, goal: Cell, avoided: Set[Cell] = frozenset()
    ) -> list[str] | None:
        """The fewest buttons from one cell to another; None if no way is known. It leads onto a
        mark only where that is the goal: a door on the way would lead elsewhere."""
        seen = self._walkable.get(place, {})
        avoided = avoided | self._marked.get(place, set()) - {goal}
        came_from: dict[Cell, tuple[Cell, str]] = {start: (start, "")}
        queue = deque([start])
        while queue and goal not in came_from:
            cell = queue.popleft()
            for button, (dx, dy) in MOVES.items():
                ahead = (cell[0] + dx, cell[1] + dy)
                if seen.get(ahead) and ahead not in came_from and ahead not in avoided:
                    came_from[ahead] = (cell, button)
                    queue.append(ahead)
        if goal not in came_from:
            return None
        buttons: list[str] = []
        while goal != start:
            goal, button = came_from[goal]
            buttons.append(button)
        return buttons[::-1]
