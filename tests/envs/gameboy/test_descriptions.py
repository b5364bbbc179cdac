"""Descriptions: the schema, what fits together, the games that come with Ludic, and reading."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.envs.gameboy import Game, read_game
from ludic.envs.gameboy.description import Field, Grid, Mark, known_games
from ludic.envs.gameboy.emulator import read_action
from ludic.envs.gameboy.memory import Progress, Reader
from ludic.envs.gameboy.walking import MOVES, Ground, View, look
from ludic.errors import ConfigError, MissingExtraError
from ludic.registry import make_env
from tests.envs.gameboy.rom import DESCRIPTION

WALKER = DESCRIPTION.read_text(encoding="utf-8").replace("SHA1", "0" * 40)


def described(tmp_path: Path, text: str = WALKER) -> Game:
    path = tmp_path / "game.toml"
    path.write_text(text, encoding="utf-8")
    return read_game(str(path))


def fields_of(game: Game) -> dict[str, Field]:
    parts = {f"{n}.{p}": below for n, f in game.fields.items() for p, below in f.fields.items()}
    return {**game.fields, **parts}


def test_every_address_of_the_games_has_its_symbol_and_lies_in_the_working_memory() -> None:
    assert set(known_games().values()) == {"red", "blue", "yellow"}
    for name in known_games().values():
        game = read_game(name)
        assert game.screen is not None
        assert game.grid is not None
        for source in [*(f.source for f in fields_of(game).values()), game.screen.source]:
            file, symbol = source.split()
            assert file == "ram/wram.asm"
            assert symbol.startswith("w")
        for address in [*(f.address for f in game.fields.values()), game.screen.address]:
            assert 0xC000 <= address < 0xE000


def test_blue_is_red_under_another_title() -> None:
    red, blue = read_game("red"), read_game("blue")
    assert {f for f in Game.__struct_fields__ if getattr(red, f) != getattr(blue, f)} == {
        "title",
        "sha1",
    }


def test_yellow_lacks_one_byte_of_reds_memory_and_has_the_same_fields() -> None:
    red, yellow = read_game("red"), read_game("yellow")
    assert red.fields.keys() == yellow.fields.keys()
    for name, field in red.fields.items():  # the byte is wGBC, 0xCF1A
        assert field.address - yellow.fields[name].address == (field.address > 0xCF1A)
    assert fields_of(red).keys() == fields_of(yellow).keys()
    assert red.milestones == yellow.milestones
    assert yellow.table("places")[0xF8] == "Summer Beach House"


def test_the_tables_of_the_games_are_whole() -> None:
    red = read_game("red")
    assert len(set(red.table("species").values())) == 151
    assert len([item for item in red.table("items").values() if item[:2] in ("TM", "HM")]) == 55
    assert len(set(red.table("items").values())) == len(red.table("items"))
    used = {m.name for m in red.milestones.values() if m.kind == "flag"}
    assert used == set(red.table("events").values())
    assert all(number < 8 * red.fields["events"].size for number in red.table("events"))
    assert [name for name, m in red.milestones.items() if m.ends] == ["champion"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('title = "Walker"', "", "missing required field `title`"),
        ("press = 4", "press = 4\ncolour = 1", "unknown field `colour`"),
        ("press = 4", 'press = "long"', "Expected `int`"),
        ("press = 4", "press = 0", "at least 1 frame"),
        (', source = "rom.py X" }', " }", "missing required field `source`"),
        ('source = "rom.py X"', 'source = ""', "x: has no source"),
        ('"u8", source = "rom.py X"', '"u9", source = "rom.py X"', "Invalid enum value 'u9'"),
        ('sha1 = "000', 'sha1 = "0g0', "not 40 hexadecimal digits"),
        ("address = 0xC0A1", "address = 0x1C0A1", "x: address and size do not fit"),
        ('names = "places"', 'names = "towns"', "there is no table 'towns'"),
        ('count = "party_count"', 'count = "members"', "party: a list has"),
        ('walkable = "passable"', 'walkable = "floor"', "grid.walkable: there is no field 'floor'"),
        ('label = "Name"\nfield = "name"', 'label = "Name"\nfield = "nick"', "no field 'nick'"),
        ('name = "read the sign"', 'name = "read it"', "has no bit 'read it'"),
        ('field = "party.level"', 'field = "party.age"', "no field 'party.age'"),
        ('kind = "gain", field = "money"', 'kind = "gain", field = "place"', "is not a number"),
        ('"0x80" = "ABC', '"eighty" = "ABC', "eighty"),
        ("[screen]", "[monitor]", "unknown field `monitor`"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in WALKER
    with pytest.raises(ConfigError, match="is not described correctly") as caught:
        described(tmp_path, WALKER.replace(old, new, 1))
    assert said in str(caught.value)


def test_a_description_extends_another_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(WALKER, encoding="utf-8")
    game = described(
        tmp_path, 'extends = "base"\ntitle = "Second"\n[fields]\nx = { address = 0xC1A1 }\n'
    )
    assert (game.title, game.fields["x"].address, game.fields["x"].type) == ("Second", 0xC1A1, "u8")
    assert game.fields["y"].address == 0xC0A2


def test_an_unknown_game_is_told_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no game 'crystal': name a file, or one of blue, red"):
        read_game("crystal")


def values(game: Game, **memory: bytes) -> dict[str, Any]:
    """What is read when the named fields have these bytes, and the rest is zero."""
    whole = bytearray(0x10000)
    for name, data in memory.items():
        at = game.fields[name].address
        whole[at : at + len(data)] = data

    def read(address: int, size: int) -> Sequence[int]:
        return list(whole[address : address + size])

    return Reader(game).values(read)


@given(st.integers(0, 999_999))
def test_decimal_digits_are_read_as_their_number(number: int) -> None:
    money = bytes.fromhex(f"{number:06d}")
    assert values(read_game("red"), money=money)["money"] == number


def test_each_type_is_read_as_the_description_says() -> None:
    mouse = bytes([0x54, 0x01, 0x2C, 0, 1]).ljust(0x21, b"\x00") + bytes([12, 0x02, 0x00])
    read = values(
        read_game("red"), place=b"\x33", passable=b"\x34\x12", badges=b"\x05", owned=b"\x00\x81",
        player_name=b"\x80\xa0\xba\x50\x81", party_count=b"\x01", party=mouse.ljust(44, b"\x00"),
        bag_count=b"\x02", bag=bytes([4, 5, 0x2C, 1]), events=bytes(4) + b"\x04",
    )  # fmt: skip
    assert (read["place"], read["passable"], read["badges"]) == (
        "Viridian Forest", 0x1234, ["Boulder", "Thunder"]
    )  # fmt: skip
    assert (read["owned"], read["player_name"], read["events"]) == (
        ["8", "15"], "Aaé", ["got the starter"]
    )  # fmt: skip
    assert read["party"] == [
        {"species": "Pikachu", "hp": 300, "status": 1, "level": 12, "max_hp": 512}
    ]
    assert read["bag"] == [
        {"item": "Poké Ball", "quantity": 5},
        {"item": "0x2c", "quantity": 1},
    ]


def test_a_count_of_nonsense_is_bounded() -> None:
    assert len(values(read_game("red"), party_count=b"\xff")["party"]) == 6


def test_what_the_episode_began_with_earns_nothing_and_each_thing_earns_once() -> None:
    game = read_game("red")
    party = bytes(0x21) + b"\x05"
    at_first = values(game, badges=b"\x01", party_count=b"\x01", party=party)
    progress = Progress(game, at_first)
    assert progress.update(at_first) == {}
    grown = values(game, badges=b"\x07", party_count=b"\x01", party=bytes(0x21) + b"\x09")
    assert progress.update(grown) == {"badges": 2.0, "levels": 4 * 0.02}
    assert progress.update(at_first) == {}
    assert progress.update(grown) == {}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("A", [("a", 0)]),
        (" up, up  left\n", [("up", 0), ("up", 0), ("left", 0)]),
        ("wait", [("wait", 30)]),
        ("b wait 9 b", [("b", 0), ("wait", 9), ("b", 0)]),
        ("wait 9999", [("wait", 600)]),
        ("walk to 5 7", (5, 7)),
        ("Walk to (5, 7)", (5, 7)),
        ('{"name": "press", "arguments": {"buttons": ["a", "up"]}}', [("a", 0), ("up", 0)]),
        ('{"name": "walk_to", "arguments": {"x": 3, "y": 4}}', (3, 4)),
        ('{"name": "fly", "arguments": {"buttons": ["a"]}}', None),
        ('{"name": "press"}', None),
        ('{"name": ' + "[" * 1980, None),
        ("", None),
        ("jump", None),
        ("up;down", None),
        ("up 5", None),
        ("a a a a a a a a a", None),
        ("walk to -1 2", None),
        ("I press a", None),
    ],
)
def test_actions_are_read_or_refused(said: str, meant: Any) -> None:
    assert read_action(said, 8) == meant


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))), st.integers(0, 35))
def test_a_way_leads_over_cells_that_can_be_walked_on(walls: set[Any], end: int) -> None:
    goal = divmod(end, 6)
    cells = {(x, y): "." for x in range(6) for y in range(6)}
    ground = Ground()
    ground.see(View("here", (0, 0), cells, frozenset(set(cells) - walls)))
    reached, edge = {(0, 0)}, [(0, 0)]
    while edge:
        x, y = edge.pop()
        for dx, dy in MOVES.values():
            ahead = (x + dx, y + dy)
            if ahead in cells and ahead not in walls | reached:
                reached.add(ahead)
                edge.append(ahead)
    way = ground.way("here", (0, 0), goal)
    assert (way is not None) == (goal in reached)
    at = (0, 0)
    for button in way or []:
        at = (at[0] + MOVES[button][0], at[1] + MOVES[button][1])
        assert at not in walls
    assert way is None or at == goal
    assert ground.way("elsewhere", (0, 0), (1, 1)) is None


def test_a_way_leads_around_doors_unless_one_is_where_it_goes() -> None:
    doors = Mark(list="doors", glyph="D", walkable=True)
    grid = Grid(place="place", x="x", y="y", player=(0, 0), walkable=(0,), marks=(doors,))
    read = {"place": "here", "x": 0, "y": 0, "doors": [{"x": 1, "y": 0}]}
    view = look(grid, read, [[0, 0, 0], [0, 0, 0]], lambda *asked: [])
    assert view.drawn() == ["0 @D.", "1 ..."]
    ground = Ground()
    ground.see(view)
    assert ground.way("here", (0, 0), (2, 0)) == ["down", "right", "right", "up"]
    assert ground.way("here", (0, 0), (1, 0)) == ["right"]
    assert ground.way("here", (1, 0), (2, 0)) == ["right"]
    ground.see(look(grid, {**read, "doors": []}, [[0, 0, 0], [0, 0, 0]], lambda *asked: []))
    assert ground.way("here", (0, 0), (2, 0)) == ["right", "right"]


def test_without_the_emulator_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyboy", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[gameboy\]'"):
        make_env("gameboy", rom="game.gb")
