"""What a player may do, in words or as a call of a tool."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from ludic.envs.gameboy.emulator import BUTTONS
from ludic.envs.gameboy.walking import Cell

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
    said = action.strip().lower()[:2000]
    if said.startswith("{"):
        said = _called(said)
    if walk := _WALK.fullmatch(said):
        return int(walk[1]), int(walk[2])
    if not _BUTTONS.fullmatch(said):
        return None
    buttons = [_button(*word.split()) for word in re.findall(_BUTTON, said)]
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
    """A call of a tool in words; "" if it is none."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call["arguments"]
        if name == "walk_to":
            return f"walk to {arguments['x']} {arguments['y']}"
        buttons: Sequence[str] | str = arguments["buttons"]
        said = buttons if isinstance(buttons, str) else " ".join(buttons)
        return said if name == "press" else ""
    except (ValueError, TypeError, LookupError, RecursionError):
        return ""


def _button(name: str, frames: str = "") -> tuple[str, int]:
    return (name, min(int(frames or WAIT_FRAMES), MOST_FRAMES)) if name == "wait" else (name, 0)
