"""The last few turns."""

from __future__ import annotations

from collections.abc import Sequence

from ludic.context.full_dialog import FullDialog
from ludic.errors import ConfigError
from ludic.types import Message


class WindowedDialog(FullDialog):
    """Shows the system prompt and the last `max_turns` turns: a turn is an observation and all
    that follows it up to the next one.

    `keep_first` also keeps the first observation, for tasks that are stated only there. Once the
    window moves, history is rewritten and every turn's first prompt forks.
    """

    def __init__(self, max_turns: int = 4, *, keep_first: bool = False) -> None:
        super().__init__()
        if max_turns < 1:
            raise ConfigError(f"WindowedDialog(max_turns={max_turns}): must be at least 1")
        self.max_turns = max_turns
        self.keep_first = keep_first

    def on_before_act(self) -> Sequence[Message]:
        self._settle()
        messages = self._messages
        turns = [place for place, m in enumerate(messages) if m["role"] == "user"]
        if len(turns) <= self.max_turns:
            return tuple(messages)
        head = messages[: turns[0] + 1] if self.keep_first else messages[: turns[0]]
        return (*head, *messages[turns[-self.max_turns] :])
