"""What the model is shown of the history: the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ludic.types import Info, Message, Obs


class ContextStrategy(ABC):
    """An agent's memory. The agent reports what happens; `on_before_act` says what to show.

    A strategy never changes a message that it returned before, unless it means to rewrite
    history: then the next prompt forks, and the samples cannot be merged.
    """

    @abstractmethod
    def reset(self, system_prompt: str | None = None) -> None:
        """Forgets everything and starts with the system prompt, if there is one."""

    @abstractmethod
    def on_env_reset(self, obs: Obs, info: Info) -> None:
        """The episode began with `obs`."""

    @abstractmethod
    def on_before_act(self) -> Sequence[Message]:
        """The messages for the next model call, oldest first."""

    @abstractmethod
    def on_after_act(self, message: Message) -> None:
        """The model answered with this assistant message."""

    @abstractmethod
    def on_after_step(self, obs: Obs, info: Info) -> None:
        """The environment (or the parser, as feedback) answered with `obs`."""

    def on_tool_results(self, messages: Sequence[Message]) -> None:
        """Tools that the last assistant message called answered with these tool messages. A
        strategy that does not tell them from observations hears each as one."""
        for message in messages:
            self.on_after_step(message["content"], {})
