"""Players without a model: scripted opponents and stand-ins for seats that are not trained."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from ludic.errors import ConfigError
from ludic.types import Action, Obs


@runtime_checkable
class Bot(Protocol):
    """Plays one seat. It answers at once, or asynchronously; it leaves no rollout."""

    def reset(self, *, seed: int | None) -> None:
        """An episode begins. All of the bot's chances come from `seed`, which is derived from
        the environment's: the episodes of a group meet the same opponent."""

    def act(self, obs: Obs) -> Action | Awaitable[Action]:
        """Its move, given what it last saw."""
        ...


BotFunction: TypeAlias = Callable[[Obs], Action | Awaitable[Action]]


class FunctionBot:
    """A function from observation to action, as a bot."""

    def __init__(self, function: BotFunction) -> None:
        self._function = function

    def reset(self, *, seed: int | None) -> None:
        return None

    def act(self, obs: Obs) -> Action | Awaitable[Action]:
        return self._function(obs)


class SequenceBot:
    """Plays a fixed list of actions, from the beginning again when it is used up."""

    def __init__(self, actions: Sequence[Action]) -> None:
        if not actions:
            raise ConfigError("SequenceBot needs at least one action")
        self._actions = tuple(actions)
        self._next = 0

    def reset(self, *, seed: int | None) -> None:
        self._next = 0

    def act(self, obs: Obs) -> Action:
        action = self._actions[self._next % len(self._actions)]
        self._next += 1
        return action


class RandomBot:
    """Plays one of `choices` at random, without looking."""

    def __init__(self, choices: Sequence[Action]) -> None:
        if not choices:
            raise ConfigError("RandomBot needs at least one choice")
        self._choices = tuple(choices)
        self._random = random.Random(0)

    def reset(self, *, seed: int | None) -> None:
        self._random = random.Random(seed)

    def act(self, obs: Obs) -> Action:
        return self._random.choice(self._choices)
