"""PyBoy, as far as an environment needs it: buttons, frames, bytes, snapshots and the picture."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

from ludic.envs.adapters import load_package
from ludic.errors import EnvError

BUTTONS = ("up", "down", "left", "right", "a", "b", "start", "select")
_SHADES = " ░▒▓█"
_CARTRIDGE = 0x147
"""Where a ROM says what its cartridge has."""
_WITH_CLOCK = (0x0F, 0x10)


def load_pyboy() -> Any:
    """The package; an error that names the extra where it is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a window, which there is none of
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
        if rom[_CARTRIDGE] in _WITH_CLOCK:  # which would go on with the time of day
            self._pyboy.rtc_lock_experimental(True)
        self.frames = 0

    def run(self, frames: int, *, drawn: bool = True) -> None:
        """Lets so many frames go by; the last one can be drawn."""
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
            raise EnvError(f"this is no state that PyBoy can load: {error}") from error
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
