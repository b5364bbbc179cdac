"""What a game's file says: where its values lie, how its text is written, what earns a reward.

A file may extend another, of which it repeats only what is different.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ludic.errors import ConfigError
from ludic.plumbing.records import Record, ready

GAMES = Path(__file__).parent / "games"

NUMBERS = ("u8", "u16le", "u16be", "bcd")


class Field(Record, frozen=True, kw_only=True):
    """A value in memory. In a list, `address` counts from the beginning of an entry.

    `source` says where the address can be looked up. `size` counts bytes. `names` is a table that
    turns a number into a word, and the bits of `bits` into several. A list has `count` entries (a
    number, or the field that has it, `most` at most), which lie `stride` bytes apart.
    """

    address: int
    type: Literal["u8", "u16le", "u16be", "bcd", "bits", "text", "list"]
    source: str
    size: int = 1
    names: str | None = None
    count: int | str = 0
    most: int = 32
    stride: int = 0
    fields: Mapping[str, Field] = {}


class Text(Record, frozen=True, kw_only=True):
    """How text is written: `runs` has characters that follow each other from a code on, `codes`
    what single codes stand for. `end` closes a text. Codes below `first_tile` are text in memory,
    but pictures on the screen."""

    end: int = 0
    first_tile: int = 0
    runs: Mapping[str, str] = {}
    codes: Mapping[str, str] = {}

    def table(self) -> dict[int, str]:
        """What each code stands for."""
        runs = {int(at, 0) + i: c for at, run in self.runs.items() for i, c in enumerate(run)}
        return runs | {int(code, 0): text for code, text in self.codes.items()}


class Screen(Record, frozen=True, kw_only=True):
    """Where the tiles that are shown lie: rows of `width`, `stride` bytes apart."""

    address: int
    source: str
    width: int = 20
    height: int = 18
    stride: int = 20


class Mark(Record, frozen=True, kw_only=True):
    """Things on the ground: the entries of a list with `x` and `y`, less `offset`, from the entry
    `first` on, unless the entry has one of the values in `unless`."""

    list: str
    glyph: str
    walkable: bool
    offset: int = 0
    first: int = 0
    unless: Mapping[str, int] = {}


class Grid(Record, frozen=True, kw_only=True):
    """The ground: `cell` tiles are a step, and the one at `tile` in a cell says whether it can be
    walked on. These tiles are `walkable`: a list, or a field that points to one which 0xFF ends,
    in the ROM's `bank`. `player` is the cell of the screen in which the player always stands."""

    place: str
    x: str
    y: str
    player: tuple[int, int]
    walkable: tuple[int, ...] | str
    bank: int | None = None
    cell: int = 1
    tile: tuple[int, int] = (0, 0)
    marks: tuple[Mark, ...] = ()


class Shown(Record, frozen=True, kw_only=True):
    """A line of the observation. `each` formats an entry of a list; the line is left out while the
    field `when` is zero."""

    label: str
    field: str
    each: str = "{}"
    empty: str = "none"
    when: str | None = None


class Milestone(Record, frozen=True, kw_only=True):
    """What earns `reward`: `each` new value or bit of a field, the bit `name` (`flag`), or each
    point by which a number passes its highest so far (`gain`; `party.level` is the sum over a
    list). What the episode began with earns nothing. One that `ends` ends the episode."""

    kind: Literal["each", "flag", "gain"]
    field: str
    reward: float
    name: str | None = None
    ends: bool = False


class Game(Record, frozen=True, kw_only=True):
    """A game. A button is held for `press` frames, after which the game has `settle` frames to
    react; it is ready `boot` frames after it was switched on."""

    title: str
    sha1: str
    press: int = 8
    settle: int = 16
    boot: int = 120
    fields: Mapping[str, Field]
    names: Mapping[str, tuple[str, ...] | Mapping[str, str]] = {}
    text: Text = Text()
    screen: Screen | None = None
    grid: Grid | None = None
    show: tuple[Shown, ...] = ()
    milestones: Mapping[str, Milestone] = {}

    def table(self, name: str) -> dict[int, str]:
        """What the numbers of a table of `names` stand for."""
        words = self.names[name]
        if isinstance(words, Mapping):
            return {int(number, 0): word for number, word in words.items()}
        return dict(enumerate(words))


def read_game(name: str) -> Game:
    """Returns the description with that name, or from the file at that path; raises
    `ConfigError` if it does not fit together."""
    try:
        game = msgspec.convert(_read(name), ready(Game))
        faults = list(_faults(game))
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"the game {name!r} is not described correctly: {error}") from error
    if faults:
        raise ConfigError(f"the game {name!r} is not described correctly: {'; '.join(faults)}")
    return game


def known_games() -> dict[str, str]:
    """The name of each description that comes with Ludic, by the SHA-1 of its ROM."""
    return {read_game(path.stem).sha1: path.stem for path in sorted(GAMES.glob("*.toml"))}


def _read(name: str) -> dict[str, Any]:
    path = GAMES / f"{name}.toml"
    if not path.is_file():
        path = Path(name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        names = ", ".join(path.stem for path in sorted(GAMES.glob("*.toml")))
        raise ConfigError(f"there is no game {name!r}: name a file, or one of {names}") from None
    if base := data.pop("extends", None):
        beside = path.parent / f"{base}.toml"
        return _merged(_read(str(beside) if beside.is_file() else base), data)
    return data


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(base[key], value)
        for key, value in own.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return {**base, **own, **both}


def _faults(game: Game) -> Iterator[str]:
    """What the schema cannot say: names that lead nowhere, and impossible sizes."""
    if len(game.sha1) != 40 or set(game.sha1) - set("0123456789abcdef"):
        yield f"sha1 {game.sha1!r} is not 40 hexadecimal digits"
    if min(game.press, game.settle, game.boot) < 1:
        yield "press, settle and boot are at least 1 frame"
    game.text.table()
    for name in game.names:
        game.table(name)
    for name, field in game.fields.items():
        yield from _field_faults(name, field, game)
    grid = game.grid
    if grid is not None:
        if game.screen is None:
            yield "a grid is read from the screen's tiles: describe the screen"
        for role in ("place", "x", "y", "walkable"):
            name = getattr(grid, role)
            if isinstance(name, str) and name not in game.fields:
                yield f"grid.{role}: there is no field {name!r}"
        for mark in grid.marks:
            entries = game.fields.get(mark.list)
            if entries is None or not {"x", "y", *mark.unless} <= set(entries.fields):
                yield f"grid.marks: {mark.list!r} is not a list with x, y and {sorted(mark.unless)}"
    for line in game.show:
        for name in filter(None, (line.field, line.when)):
            if name not in game.fields:
                yield f"show {line.label!r}: there is no field {name!r}"
    for name, milestone in game.milestones.items():
        yield from _milestone_faults(name, milestone, game)


def _field_faults(name: str, field: Field, game: Game, inside: bool = False) -> Iterator[str]:
    if not 0 <= field.address <= 0xFFFF or not 1 <= field.size <= 0x400:
        yield f"{name}: address and size do not fit into the memory"
    if not field.source.strip():
        yield f"{name}: has no source"
    if field.names is not None and field.names not in game.names:
        yield f"{name}: there is no table {field.names!r}"
    if field.type == "list":
        counted = isinstance(field.count, int) or field.count in game.fields
        if inside or field.stride < 1 or not field.fields or not counted:
            yield f"{name}: a list has fields, a stride, and a count (a number or a field)"
    for part, below in field.fields.items():
        yield from _field_faults(f"{name}.{part}", below, game, inside=True)


def _milestone_faults(name: str, milestone: Milestone, game: Game) -> Iterator[str]:
    first, _, part = milestone.field.partition(".")
    field = game.fields.get(first)
    if field is not None and part:
        field = field.fields.get(part)
    if field is None:
        yield f"milestone {name!r}: there is no field {milestone.field!r}"
    elif milestone.kind == "gain" and (field.type not in NUMBERS or field.names):
        yield f"milestone {name!r}: {milestone.field!r} is not a number"
    elif milestone.kind == "flag" and (
        field.type != "bits"
        or field.names is None
        or milestone.name not in game.table(field.names).values()
    ):
        yield f"milestone {name!r}: {milestone.field!r} has no bit {milestone.name!r}"
