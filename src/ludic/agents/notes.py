"""Notes: what a model writes down to know it later, whatever becomes of the dialogue."""

from __future__ import annotations

from ludic.agents.tools import Tool
from ludic.errors import ConfigError, ToolError


class Notes:
    """The notes of one agent in one episode, of at most `max_chars` characters together. The model
    writes them with the tools `note` and `forget`; numbers are not given twice."""

    def __init__(self, max_chars: int = 2000) -> None:
        if max_chars < 1:
            raise ConfigError(f"max_note_chars={max_chars}: must be at least 1")
        self.max_chars = max_chars
        self.clear()

    def clear(self) -> None:
        """Forgets all notes, and begins to count anew."""
        self._notes: dict[int, str] = {}
        self._last = 0

    def text(self) -> str:
        """All notes as the model is shown them; empty if there are none."""
        if not self._notes:
            return ""
        return "\n".join(["Your notes:", *(f"{n}. {text}" for n, text in self._notes.items())])

    def tools(self) -> list[Tool]:
        """The tools that write these notes."""
        return [Tool.of(self.note), Tool.of(self.forget)]

    async def note(self, text: str) -> str:
        """Writes a note. Notes are still shown to you when earlier turns are not.

        Args:
            text: What to remember.
        """
        text = " ".join(text.split())
        if not text:
            raise ToolError("the note is empty")
        used = sum(map(len, self._notes.values()))
        if used + len(text) > self.max_chars:
            raise ToolError(
                f"the note has {len(text)} characters, and {self.max_chars - used} of "
                f"{self.max_chars} are left: shorten it, or forget another note first"
            )
        self._last += 1
        self._notes[self._last] = text
        return f"Note {self._last} is written."

    async def forget(self, number: int) -> str:
        """Removes a note.

        Args:
            number: The number of the note.
        """
        if number not in self._notes:
            numbers = ", ".join(map(str, self._notes)) or "none"
            raise ToolError(f"there is no note {number}; the notes are: {numbers}")
        del self._notes[number]
        return f"Note {number} is forgotten."
