"""PyBoy, as far as an environment needs it: buttons, frames, bytes, snapshots and the picture;
and what a player may do, in words or as a call of a tool."""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

from ludic.envs.adapters import load_package
from ludic.envs.gameboy.walking import Cell
from ludic.errors import EnvError

BUTTONS = ("up", "down", "left", "right", "a", "b", "start", "select")
_SHADES = " ░▒▓█"
_CARTRIDGE = 0x147
"""Where a ROM says what its cartridge has."""
_WITH_CLOCK = (0x0F, 0x10)


def load_pyboy() -> Any:
    """Returns the package; if it is missing, the error names the extra."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a window, and there is none
        return load_package("pyboy", "gameboy")


class Emulator:
    """A Game Boy with a cartridge, switched on. It reads and writes no file: the battery of the
    cartridge is part of a snapshot. A clock in the cartridge stands still."""

    def __init__(self, rom: bytes) -> None:
        try:
            self._pyboy = load_pyboy().PyBoy(
                io.BytesIO(rom), window="null", sound_emulated=False, log_level="CRITICAL"
            )
        except Exception as error:
            raise EnvError(f"PyBoy does not take this ROM: {error}") from error
        self._pyboy.set_emulation_speed(0)
        if rom[_CARTRIDGE] in _WITH_CLOCK:  # which would run on with the time of day
            self._pyboy.rtc_lock_experimental(True)
        self.frames = 0

    def run(self, frames: int, *, drawn: bool = True) -> None:
        """Lets this many frames go by; the last one can be drawn."""
        self._pyboy.tick(frames, drawn)
        self.frames += frames

    def press(self, button: str, held: int, after: int) -> None:
        """Holds a button for `held` frames, and lets `after` frames go by."""
        self._pyboy.button_press(button)
        self.run(held, drawn=False)
        self._pyboy.button_release(button)
        self.run(after)

    def read(self, address: int, size: int, bank: int | None = None) -> Sequence[int]:
        """Bytes of the memory. A bank is one of the ROM, if the address lies in what is switched,
        0x4000 to 0x7FFF; PyBoy does not read the last byte of one."""
        end = min(address + size, 0x10000)
        if bank is not None and 0x4000 <= address < 0x7FFF:
            values: Sequence[int] = self._pyboy.memory[bank, address : min(end, 0x7FFF)]
        else:
            values = self._pyboy.memory[address:end]
        return values

    def snapshot(self) -> bytes:
        """The whole machine."""
        buffer = io.BytesIO()
        self._pyboy.save_state(buffer)
        return buffer.getvalue()

    def restore(self, snapshot: bytes) -> None:
        """Makes the machine what it was when the snapshot was taken, with no button held."""
        try:
            self._pyboy.load_state(io.BytesIO(snapshot))
        except Exception as error:
            raise EnvError(f"PyBoy cannot load this state: {error}") from error
        for button in BUTTONS:
            self._pyboy.button_release(button)
        self.frames = 0

    def picture(self) -> list[str]:
        """The screen as 36 rows of 80 blocks, from white to black."""
        grey = self._pyboy.screen.ndarray[:, :, :3].mean(axis=2)
        blocks = grey.reshape(36, 4, 80, 2).mean(axis=(1, 3))
        levels = ((255 - blocks) * (len(_SHADES) - 1) / 255).round().astype(int)
        return ["".join(_SHADES[level] for level in row) for row in levels]

    def close(self) -> None:
        self._pyboy.stop(save=False)


WAIT_FRAMES = 30
MOST_FRAMES = 600

Buttons: TypeAlias = list[tuple[str, int]]
"""Buttons in order; "wait" with its frames."""

_WALK = re.compile(r"walk\s+to\s+\(?(\d{1,5})\s*,?\s+(\d{1,5})\)?")
_BUTTON = rf"wait\s+\d{{1,4}}|wait|{'|'.join(BUTTONS)}"
_BUTTONS = re.compile(rf"(?:{_BUTTON})(?:[\s,]+(?:{_BUTTON}))*")


def read_action(action: str, most: int) -> Buttons | Cell | None:
    """The buttons, or the cell to walk to; None for what is neither.

    >>> read_action("up a, wait 10", 8)
    [('up', 0), ('a', 0), ('wait', 10)]
    >>> read_action("walk to 5 7", 8)
    (5, 7)
    """
    words = action.strip().lower()[:2000]
    if words.startswith("{"):
        words = _called(words)
    if walk := _WALK.fullmatch(words):
        return int(walk[1]), int(walk[2])
    if not _BUTTONS.fullmatch(words):
        return None
    buttons = [_button(*word.split()) for word in re.findall(_BUTTON, words)]
    return buttons if len(buttons) <= most else None


def tools(walking: bool) -> list[dict[str, Any]]:
    """The schemas of the actions as tools."""
    word = {"type": "string", "enum": [*BUTTONS, "wait"]}
    press = _tool(
        "press", "Presses buttons, one after another.",
        {"buttons": {"type": "array", "items": word}},
    )  # fmt: skip
    number = {"type": "integer"}
    walk = _tool("walk_to", "Walks to a cell of this map.", {"x": number, "y": number})
    return [press, walk] if walking else [press]


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    about = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": about}


def _called(text: str) -> str:
    """A tool call in words; "" for text that is not one."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call["arguments"]
        if name == "walk_to":
            return f"walk to {arguments['x']} {arguments['y']}"
        buttons: Sequence[str] | str = arguments["buttons"]
        words = buttons if isinstance(buttons, str) else " ".join(buttons)
        return words if name == "press" else ""
    except (ValueError, TypeError, LookupError, RecursionError):
        return ""


def _button(name: str, frames: str = "") -> tuple[str, int]:
    return (name, min(int(frames or WAIT_FRAMES), MOST_FRAMES)) if name == "wait" else (name, 0)
