"""The whole dialogue, as it was, or the last few turns of it."""

from __future__ import annotations

from collections.abc import Sequence

from ludic.context.base import ContextStrategy
from ludic.errors import ConfigError
from ludic.types import Info, Message, Obs


class FullDialog(ContextStrategy):
    """Shows everything. Observations that arrive between two model calls make one user message,
    so that roles alternate; an empty observation says nothing and adds none.

    The message objects are never copied or changed once shown: each call's messages begin with
    the very objects of the call before.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._heard: list[Obs] = []

    @property
    def history(self) -> tuple[Message, ...]:
        """Everything that was said and heard, whatever the model is shown of it."""
        self._settle()
        return tuple(self._messages)

    def reset(self, system_prompt: str | None = None) -> None:
        self._messages = []
        self._heard = []
        if system_prompt:
            self._messages.append({"role": "system", "content": system_prompt})

    def on_env_reset(self, obs: Obs, info: Info) -> None:
        self._hear(obs)

    def on_before_act(self) -> Sequence[Message]:
        return self.history

    def on_after_act(self, message: Message) -> None:
        self._settle()
        self._messages.append(message)

    def on_tool_results(self, messages: Sequence[Message]) -> None:
        self._messages.extend(messages)

    def on_after_step(self, obs: Obs, info: Info) -> None:
        self._hear(obs)

    def _hear(self, obs: Obs) -> None:
        if obs:
            self._heard.append(obs)

    def _settle(self) -> None:
        """Makes one user message of what was heard since the last model call."""
        if self._heard:
            self._messages.append({"role": "user", "content": "\n\n".join(self._heard)})
            self._heard = []


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
        messages = self.history
        turns = [place for place, m in enumerate(messages) if m["role"] == "user"]
        if len(turns) <= self.max_turns:
            return messages
        head = messages[: turns[0] + 1] if self.keep_first else messages[: turns[0]]
        return (*head, *messages[turns[-self.max_turns] :])
