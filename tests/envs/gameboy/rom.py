"""A game for the Game Boy, written by this script: two rooms, a sign, coins, a door and a goal.

The player moves by the joypad, one cell for each press. A in front of the sign opens a dialogue,
which A or B close. START raises a level, SELECT finds an item. Everything that the description in
`walker.toml` names is at the address that it says. The sources of the addresses are here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

PLACE, X, Y, FACING, DIALOGUE = 0xC0A0, 0xC0A1, 0xC0A2, 0xC0A3, 0xC0A4
MONEY, BADGES, EVENTS, PASSABLE, HELD = 0xC0A5, 0xC0A8, 0xC0A9, 0xC0AA, 0xC0AC
PARTY_COUNT, PARTY, BAG_COUNT, BAG, NAME = 0xC0AE, 0xC0B0, 0xC0C0, 0xC0C1, 0xC0D0

HALL = ["########", "#.....S#", "#.##..##", "#.#$..##", "#.....>#", "########"]
GARDEN = ["######", "#.?$.#", "#.##.#", "#...*#", "######"]
TILES = {".": 0, "#": 1, "S": 2, "$": 3, "*": 4, ">": 5, "?": 7}
"""What looks like floor at "?" cannot be entered."""
SCREEN, ROOMS, PATTERNS, TEXT, FLOOR = 0x9800, 0x2000, 0x2800, 0x2A00, 0x4A40
DESCRIPTION = Path(__file__).parent / "walker.toml"


def letters(text: str) -> bytes:
    return bytes(0x7F if c == " " else 0x80 + ord(c) - ord("A") for c in text)


class Program:
    """Machine code with labels; jumps to them are filled in at the end."""

    def __init__(self, origin: int) -> None:
        self.origin, self.code = origin, bytearray()
        self.labels: dict[str, int] = {}
        self.gaps: list[tuple[int, str, bool]] = []

    def label(self, name: str) -> None:
        self.labels[name] = self.origin + len(self.code)

    def do(self, *parts: int) -> None:
        self.code += bytes(parts)

    def to(self, opcode: int, label: str) -> None:
        """A jump or a call; a short one where the opcode is that of a relative jump."""
        self.do(opcode)
        short = opcode in (0x18, 0x20, 0x28, 0x30, 0x38)
        self.gaps.append((len(self.code), label, short))
        self.do(*([0] if short else [0, 0]))

    def load(self, address: int) -> None:  # ld a, [address]
        self.do(0xFA, address & 0xFF, address >> 8)

    def store(self, address: int) -> None:  # ld [address], a
        self.do(0xEA, address & 0xFF, address >> 8)

    def put(self, address: int, value: int) -> None:
        self.do(0x3E, value)
        self.store(address)

    def copy(self, source: int, target: int, size: int) -> None:
        self.do(0x21, source & 0xFF, source >> 8, 0x11, target & 0xFF, target >> 8)  # hl, de
        self.do(0x01, size & 0xFF, size >> 8)  # ld bc, size
        self.to(0xCD, "copy")

    def bytes(self) -> bytes:
        for at, label, short in self.gaps:
            target = self.labels[label]
            if short:
                self.code[at] = (target - self.origin - at - 1) & 0xFF
            else:
                self.code[at : at + 2] = target.to_bytes(2, "little")
        return bytes(self.code)


SCREEN_OFF, SCREEN_ON = (0x3E, 0x11, 0xE0, 0x40), (0x3E, 0x91, 0xE0, 0x40)
"""The screen's memory cannot be written while it is drawn."""
CALL, JP, JR, JR_NZ, JR_Z, JR_NC = 0xCD, 0xC3, 0x18, 0x20, 0x28, 0x30


def program() -> bytes:
    p = Program(0x150)
    p.do(0xF3, 0x31, 0xFE, 0xFF)  # di; ld sp
    p.do(*SCREEN_OFF)
    p.copy(PATTERNS, 0x8000, 8 * 16)
    p.copy(PATTERNS + 6 * 16, 0x8800, 16)
    start = {PLACE: 0, X: 1, Y: 1, FACING: 1, DIALOGUE: 0, BADGES: 0, EVENTS: 0, HELD: 0}
    start |= {MONEY: 0, MONEY + 1: 0x01, MONEY + 2: 0x95, PARTY_COUNT: 1, BAG_COUNT: 0}
    start |= {PASSABLE: FLOOR & 0xFF, PASSABLE + 1: FLOOR >> 8}
    start |= {PARTY: 1, PARTY + 1: 1, PARTY + 2: 0x2C, PARTY + 3: 5}  # HP 300, level 5
    start |= {NAME + i: byte for i, byte in enumerate(letters("ANN") + b"\x50")}
    for address, value in start.items():
        p.put(address, value)
    p.to(CALL, "draw")

    p.label("loop")
    p.do(0xF0, 0x44, 0xFE, 144)  # ldh a, [LY]; cp 144
    p.to(JR_NZ, "loop")
    for select in (0x20, 0x10):  # the directions, then the buttons
        p.do(0x3E, select, 0xE0, 0x00, *[0xF0, 0x00] * 4, 0xE6, 0x0F)  # and 0x0F
        p.do(*([0xCB, 0x37, 0x4F] if select == 0x20 else [0xB1, 0x2F, 0x4F]))  # swap, or, cpl
    p.load(HELD)
    p.do(0x2F, 0xA1, 0x47, 0x79)  # b = pressed now and not before; a = c
    p.store(HELD)
    p.do(0x78, 0xB7)  # ld a, b; or a
    p.to(JR_Z, "rest")
    p.to(CALL, "pressed")
    p.label("rest")
    p.do(0xF0, 0x44, 0xFE, 144)
    p.to(JR_Z, "rest")
    p.to(JR, "loop")

    p.label("pressed")
    p.load(DIALOGUE)
    p.do(0xB7)
    p.to(JR_Z, "free")
    p.do(0x78, 0xE6, 0x03, 0xC8)  # A or B, else return
    p.put(DIALOGUE, 0)
    p.to(JP, "draw")
    p.label("free")
    for bit, (facing, dx, dy) in {
        4: (3, 1, 0), 5: (2, -1, 0), 6: (0, 0, -1), 7: (1, 0, 1)
    }.items():  # fmt: skip
        p.do(0xCB, 0x40 + 8 * bit)  # bit n, b
        p.to(JR_Z, f"not {bit}")
        p.put(FACING, facing)
        p.do(0x16, dx & 0xFF, 0x1E, dy & 0xFF)  # ld d; ld e
        p.to(JP, "step")
        p.label(f"not {bit}")
    p.do(0xCB, 0x40)  # A
    p.to(JR_Z, "not talking")
    p.to(JP, "talk")
    p.label("not talking")
    p.do(0xCB, 0x58)  # START: the level grows
    p.to(JR_Z, "not started")
    p.load(PARTY + 3)
    p.do(0x3C)
    p.store(PARTY + 3)
    p.do(0xC9)
    p.label("not started")
    p.do(0xCB, 0x50, 0xC8)  # SELECT, else return
    p.put(BAG_COUNT, 1)
    p.put(BAG, 2)
    p.load(BAG + 1)
    p.do(0x3C)
    p.store(BAG + 1)
    p.do(0xC9)

    p.label("ahead")  # d, e become the cell that is d, e away
    p.load(X)
    p.do(0x82, 0x57)
    p.load(Y)
    p.do(0x83, 0x5F, 0xC9)

    p.label("tile")  # a: the tile of the cell d, e
    p.do(0x7B, 0xC6, 4, 0x6F, 0x26, 0, *[0x29] * 5, 0x7A, 0xC6, 4, 0x85, 0x6F)
    p.load(PLACE)
    p.do(0x87, 0x87, 0xC6, ROOMS >> 8, 0x84, 0x67, 0x7E, 0xC9)

    p.label("step")
    p.to(CALL, "ahead")
    p.to(CALL, "tile")
    p.do(0xFE, 1, 0xC8, 0xFE, 2, 0xC8, 0xFE, 7, 0xC8, 0x4F)  # walls and signs stop it; c = tile
    for register, address in ((0x7A, X), (0x7B, Y)):
        p.do(register)
        p.store(address)
    p.do(0x79, 0xFE, 3)
    p.to(JR_NZ, "no coin")
    p.load(MONEY + 2)
    p.do(0xC6, 0x10, 0x27)  # add 10 in decimal
    p.store(MONEY + 2)
    p.load(MONEY + 1)
    p.do(0xCE, 0, 0x27)
    p.store(MONEY + 1)
    p.label("no coin")
    p.do(0x79, 0xFE, 4)
    p.to(JR_NZ, "no goal")
    p.put(BADGES, 1)
    p.label("no goal")
    p.do(0x79, 0xFE, 5)
    p.to(JR_NZ, "no door")
    for address in (PLACE, X, Y):
        p.put(address, 1)
    p.label("no door")
    p.to(JP, "draw")

    p.label("talk")
    p.do(0x11, 0, 0)
    for facing, (dx, dy) in {0: (0, -1), 1: (0, 1), 2: (-1, 0), 3: (1, 0)}.items():
        p.load(FACING)
        p.do(0xFE, facing)
        p.to(JR_NZ, f"not facing {facing}")
        p.do(0x16, dx & 0xFF, 0x1E, dy & 0xFF)
        p.label(f"not facing {facing}")
    p.to(CALL, "ahead")
    p.to(CALL, "tile")
    p.do(0xFE, 2, 0xC0)  # a sign, else return
    p.put(DIALOGUE, 1)
    p.load(EVENTS)
    p.do(0xF6, 4)
    p.store(EVENTS)
    p.do(*SCREEN_OFF)
    for row in range(4):
        p.copy(TEXT if row == 1 else TEXT + 20, SCREEN + (14 + row) * 32, 20)
    p.do(*SCREEN_ON, 0xC9)

    p.label("draw")  # the room around the player, who is in the cell 4, 4 of the screen
    p.do(*SCREEN_OFF)
    p.load(Y)
    p.do(0x6F, 0x26, 0, *[0x29] * 5)
    p.load(X)
    p.do(0x85, 0x6F)
    p.load(PLACE)
    p.do(0x87, 0x87, 0xC6, ROOMS >> 8, 0x84, 0x67, 0x11, SCREEN & 0xFF, SCREEN >> 8, 0x0E, 9)
    p.label("cells")
    p.do(0xE5)
    p.to(CALL, "row")
    p.do(0xE1, 0xE5)
    p.to(CALL, "row")
    p.do(0xE1, 0x7D, 0xC6, 32, 0x6F)
    p.to(JR_NC, "same page")
    p.do(0x24)
    p.label("same page")
    p.do(0x0D)
    p.to(JR_NZ, "cells")
    for tile in (0x108, 0x109, 0x128, 0x129):
        p.put(SCREEN + tile, 6)
    p.do(*SCREEN_ON, 0xC9)
    p.label("row")
    p.do(0x06, 10)
    p.label("column")
    p.do(0x2A, 0x12, 0x13, 0x12, 0x13, 0x05)
    p.to(JR_NZ, "column")
    p.do(0x7B, 0xC6, 12, 0x5F, 0xD0, 0x14, 0xC9)

    p.label("copy")
    p.do(0x2A, 0x12, 0x13, 0x0B, 0x78, 0xB1)
    p.to(JR_NZ, "copy")
    p.do(0xC9)
    return p.bytes()


def room(rows: list[str]) -> bytes:
    """Rows of 32 cells, with four of wall before the first and after the last."""
    wall = [""] * 4
    return b"".join(
        bytes([TILES["#"]] * 4 + [TILES[c] for c in row]).ljust(32, b"\x01")
        for row in [*wall, *rows, *wall, *wall]
    )


def rom() -> bytes:
    """The cartridge: 32 KiB without a logo."""
    data = bytearray(0x8000)
    data[0x100:0x104] = b"\x00\xc3\x50\x01"  # nop; jp 0x150
    data[0x134:0x13A] = b"WALKER"
    data[0x14D] = -sum(data[0x134:0x14D]) - 0x19 & 0xFF
    code = program()
    assert 0x150 + len(code) <= ROOMS
    data[0x150 : 0x150 + len(code)] = code
    for number, rows in enumerate((HALL, GARDEN)):
        at = ROOMS + number * 0x400
        data[at : at + len(room(rows))] = room(rows)
    patterns = [0x00, 0xFF, 0x0F, 0x3C, 0x55, 0x81, 0x77, 0x00]
    for number, pattern in enumerate(patterns):
        data[PATTERNS + number * 16 : PATTERNS + number * 16 + 16] = bytes([pattern] * 16)
    said = letters(" HELLO ANN").ljust(20, b"\x7f")
    data[TEXT : TEXT + 40] = said + b"\x7f" * 20
    data[FLOOR : FLOOR + 6] = b"\x00\x03\x04\x05\x07\xff"  # in the bank that is switched
    return bytes(data)


def write_game(folder: Path) -> dict[str, Any]:
    """Writes the ROM and its description; what the environment is then given."""
    cartridge = rom()
    (folder / "walker.gb").write_bytes(cartridge)
    described = DESCRIPTION.read_text(encoding="utf-8")
    described = described.replace("SHA1", hashlib.sha1(cartridge).hexdigest())
    (folder / "walker.toml").write_text(described, encoding="utf-8")
    return {"rom": str(folder / "walker.gb"), "game": str(folder / "walker.toml")}
