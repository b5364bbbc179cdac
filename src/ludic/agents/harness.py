"""An agent for long play: tools, notes, a reminder when it is stuck, a bound on each step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ludic.agents.base_agent import ActResult
from ludic.agents.model_calls import ModelCall
from ludic.agents.react_agent import ReActAgent
from ludic.agents.tools import Tool, ToolResult
from ludic.context.compacting import CompactingDialog
from ludic.errors import AgentError, ConfigError, ToolError
from ludic.inference.client import ToolRequest
from ludic.inference.templates.chat_template import ChoosesToolParser
from ludic.parsers import ParseResult
from ludic.types import Info, Obs

REMINDER = "Nothing has changed for {steps} steps. Try something else."


class HarnessAgent(ReActAgent):
    """Plays for thousands of steps. Give it the context `compacting`.

    An environment may offer its actions as tools: it lists their JSON schemas as `info["tools"]`
    of its reset. A call of one of them ends the turn, and is the action: a JSON object with `name`
    and `arguments`. A message without a call is read by the parser, as always. A step takes at most
    `max_rounds` model calls.

    Args:
        notes: Whether the model has the tools `note` and `forget`. What it notes is shown with
            every summary, and lasts until the episode ends.
        max_note_chars: How long all notes together may be.
        remind_after: After this many steps that led to the same observation, or to none because the
            answer could not be read, the model is reminded to try something else; 0 for never.
        reminder: What it is then told.
    """

    def __init__(
        self,
        *args: Any,
        notes: bool = True,
        max_note_chars: int = 2000,
        remind_after: int = 10,
        reminder: str = REMINDER,
        **options: Any,
    ) -> None:
        if remind_after < 0:
            raise AgentError(f"remind_after={remind_after}: must be >= 0")
        self.notes = Notes(max_note_chars) if notes else None
        own = self.notes.tools() if self.notes is not None else []
        options["tools"] = [*options.get("tools", ()), *own]
        self._actions: Mapping[str, Mapping[str, Any]] = {}
        super().__init__(*args, **options)
        self.remind_after, self.reminder = remind_after, reminder
        self._last_obs: Obs | None = None
        self._unchanged = 0
        if self.notes is not None and isinstance(self.ctx, CompactingDialog):
            self.ctx.notes, self.ctx.max_note_chars = self.notes.text, max_note_chars

    def reset(self, *args: Any, **options: Any) -> None:
        super().reset(*args, **options)
        if self.notes is not None:
            self.notes.clear()
        self._actions, self._unchanged = {}, 0

    def on_env_reset(self, obs: Obs, info: Info) -> None:
        self._actions = _by_name(info.get("tools", ()))
        self._know(tuple(self.internal_tools.values()))
        if self._actions and isinstance(self.chat_template, ChoosesToolParser):
            self.chat_template = self.chat_template.for_tools()
        self._last_obs = obs
        super().on_env_reset(obs, info)

    def _know(self, tools: Sequence[Tool]) -> None:
        super()._know(tools)
        if both := self._actions.keys() & self._known.keys():
            raise ToolError(f"{sorted(both)} are tools of the agent and of the environment")
        if self._actions:
            own = self._shown.tools if self._shown is not None else ()
            self._shown = ToolRequest([*self._actions.values(), *own])

    def on_after_step(self, obs: Obs, info: Info) -> None:
        if not info.get("parse_error") and obs != self._last_obs:
            self._last_obs, self._unchanged = obs, 0
        else:
            self._unchanged += 1
        if self.remind_after and self._unchanged and self._unchanged % self.remind_after == 0:
            reminder = self.reminder.replace("{steps}", str(self._unchanged))
            obs = f"{obs}\n\n{reminder}" if obs else reminder
        super().on_after_step(obs, info)

    async def act_by_tool(self, call: ModelCall) -> ActResult | None:
        """The turn's result if the model called a tool of the environment. The agent's own tools
        that the message calls besides are run, too."""
        calls = call.parsed.tool_calls
        actions = [c for c in calls if c["function"]["name"] in self._actions]
        if not actions:
            return None
        own = [c for c in calls if c not in actions]
        results = iter(await self._answer(call, own))
        answers = [
            next(results)
            if c in own
            else ToolResult("Done.")
            if c is actions[0]
            else ToolResult.failed("one action a step: this call was not run")
            for c in calls
        ]
        self._finish_round(call, answers)
        text = json.dumps(actions[0]["function"], ensure_ascii=False)
        return ActResult(self.steps_of_turn, ParseResult(text))


def _by_name(schemas: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    try:
        return {str(schema["function"]["name"]): schema for schema in schemas}
    except (KeyError, TypeError) as exc:
        raise ToolError(
            'info["tools"] of an environment must list schemas such as {"type": "function", '
            '"function": {"name": …, "description": …, "parameters": …}}: ' + repr(exc)
        ) from exc


class Notes:
    """The notes of one agent in one episode, of at most `max_chars` characters together. The model
    writes them with the tools `note` and `forget`; numbers are not given twice."""

    def __init__(self, max_chars: int = 2000) -> None:
        if max_chars < 1:
            raise ConfigError(f"max_note_chars={max_chars}: must be at least 1")
        self.max_chars = max_chars
        self.clear()

    def clear(self) -> None:
        """Forgets all notes, and starts counting from 1 again."""
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
