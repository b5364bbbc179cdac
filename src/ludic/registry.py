"""Names for environments, agents, protocols and tools.

Built-in names are found without importing what they stand for until it is asked for. Scripts
register their own with `register_env` and its siblings; installed packages announce theirs as
entry points in the groups `ludic.envs`, `ludic.agents`, `ludic.protocols` and `ludic.tools`. A
class can also be named by its place, `my_module:MyEnv`.

>>> @register_env("coin", description="Call heads or tails.")
... class CoinEnv: ...
>>> isinstance(make_env("coin"), CoinEnv)
True
>>> unregister_env("coin")
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ludic.errors import (
    ConfigError,
    DuplicateNameError,
    LudicError,
    MissingExtraError,
    UnknownNameError,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

F = TypeVar("F", bound=Callable[..., Any])

_PLACE = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class Builtin:
    """Where a built-in lives, as `module:attribute`, and one line about it."""

    target: str
    description: str


@dataclass(frozen=True, slots=True)
class _Registered:
    factory: Callable[..., Any]
    description: str


class Registry:
    """One kind of thing by name: built in, registered in this process, or from entry points."""

    def __init__(
        self, kind: str, builtins: Mapping[str, Builtin], group: str, base: str = ""
    ) -> None:
        self.kind, self.group = kind, group
        self._base = base
        self._builtins = dict(builtins)
        self._registered: dict[str, _Registered] = {}

    @cached_property
    def _announced(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name; read once and only when needed, since it takes milliseconds."""
        from importlib.metadata import entry_points

        found: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self.group):
            found.setdefault(entry.name, []).append(entry)
        return found

    @overload
    def register(self, name: str, factory: F, *, description: str = "") -> F: ...
    @overload
    def register(
        self, name: str, factory: None = None, *, description: str = ""
    ) -> Callable[[F], F]: ...
    def register(
        self, name: str, factory: F | None = None, *, description: str = ""
    ) -> F | Callable[[F], F]:
        """Registers `factory` under `name`, or, without a factory, decorates one.

        The description defaults to the first line of the factory's docstring.
        """
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"the name of a {self.kind} must be text, not {name!r}")

        def add(thing: F) -> F:
            if not callable(thing):
                raise ConfigError(f"{self.kind} {name!r}: {thing!r} cannot be called")
            if owner := self._owner(name):
                raise DuplicateNameError(
                    f"{self.kind} {name!r} is there already ({owner}): choose another name"
                )
            self._registered[name] = _Registered(thing, description or _first_line(thing))
            return thing

        return add if factory is None else add(factory)

    def unregister(self, name: str) -> None:
        """Takes back a name that this process registered; built-in names stay."""
        if name not in self._registered:
            raise UnknownNameError(f"registered {self.kind}", name, self._registered)
        del self._registered[name]

    def get(self, name: str) -> Callable[..., Any]:
        """The factory behind `name`; `UnknownNameError` answers with the nearest names.

        A name of the form `module:attribute` is imported, and must be a class of this kind.
        """
        own = self._registered.get(name)
        builtin = self._builtins.get(name)
        announced = self._announced.get(name, [])
        sources = [self._owner(name)] if own or builtin else []
        sources += [f"the package {_package(entry)}" for entry in announced]
        if len(sources) > 1:
            raise DuplicateNameError(
                f"{self.kind} {name!r} comes from {' and '.join(map(str, sources))}: "
                "uninstall one of them, or use a factory instead of a name"
            )
        if own:
            return own.factory
        if builtin:
            return _load(f"{self.kind} {name!r}", builtin.target)
        if announced:
            return _load(f"{self.kind} {name!r} of {sources[0]}", announced[0].value)
        if self._base and _PLACE.fullmatch(name):
            return self._import(name)
        raise UnknownNameError(self.kind, name, self.names())

    def _import(self, place: str) -> Callable[..., Any]:
        """The class at `module:attribute`. Names also come from stored data, so that only what
        can be seen to be of this kind is handed out, and never just anything callable."""
        thing: Any = _load(f"{self.kind} {place!r}", place)
        base: Any = _load(f"the base of every {self.kind}", self._base)
        if isinstance(thing, type) and issubclass(thing, base):
            return thing
        raise ConfigError(
            f"{self.kind} {place!r} is not a class derived from {base.__name__}: register a"
            f" function under a name of its own, with `register_{self.group.split('.')[-1][:-1]}`"
        )

    def make(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the factory behind `name`; arguments it does not take are a `ConfigError`."""
        factory = self.get(name)
        try:
            return factory(*args, **kwargs)
        except TypeError as exc:
            # Reading a signature costs more than most factories: only when the call went wrong.
            if complaint := _misfit(factory, args, kwargs):
                raise ConfigError(f"{self.kind} {name!r} cannot be made: {complaint}") from exc
            raise

    def names(self) -> list[str]:
        """Every known name, sorted."""
        return sorted({*self._builtins, *self._registered, *self._announced})

    def describe(self) -> dict[str, str]:
        """Every known name with one line about it. A broken package is said, not raised."""
        return {name: self._describe(name) for name in self.names()}

    def _describe(self, name: str) -> str:
        if own := self._registered.get(name):
            return own.description
        if builtin := self._builtins.get(name):
            return builtin.description
        try:
            return _first_line(self.get(name))
        except LudicError as exc:
            return f"(cannot be used: {exc})"

    def _owner(self, name: str) -> str | None:
        if name in self._builtins:
            return "built in"
        if own := self._registered.get(name):
            module = getattr(own.factory, "__module__", "?")
            return f"registered by {module}.{getattr(own.factory, '__qualname__', '?')}"
        return None


def _misfit(factory: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """Why the factory does not take these arguments; None when it does."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some callables written in C have none
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as exc:
        return f"{exc}; it takes {signature}"
    return None


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value


def _load(what: str, target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    try:
        thing: Any = import_module(module)
        for part in attribute.split("."):
            thing = getattr(thing, part)
    except MissingExtraError:  # says itself what to install
        raise
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"{what} cannot be loaded from {target!r}: {exc}") from exc
    if not callable(thing):
        raise ConfigError(f"{what}: {target!r} cannot be called")
    factory: Callable[..., Any] = thing
    return factory


def _first_line(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    return text.strip().partition("\n")[0]


ENVS = Registry(
    "environment",
    {
        "tic_tac_toe": Builtin(
            "ludic.envs.tic_tac_toe:TicTacToeEnv",
            "Tic-Tac-Toe against a seeded opponent: random, perfect or mixed.",
        ),
        "tic_tac_toe_two_player": Builtin(
            "ludic.envs.tic_tac_toe:TwoPlayerTicTacToeEnv",
            "Tic-Tac-Toe with an agent on each side, for self-play.",
        ),
        "dataset_qa": Builtin(
            "ludic.envs.dataset_qa_env:DatasetQAEnv",
            "One question from a dataset, one judged answer.",
        ),
        "gsm8k": Builtin(
            "ludic.envs.gsm8k:GSM8KEnv", "Grade-school word problems, judged by the number."
        ),
        "math": Builtin(
            "ludic.envs.math:MATHEnv", "Competition problems, judged by symbolic equality."
        ),
        "key_door": Builtin(
            "ludic.envs.key_door:KeyDoorEnv",
            "A grid world seen in part: find the key, open the door.",
        ),
    },
    "ludic.envs",
    base="ludic.envs.env:LudicEnv",
)
AGENTS = Registry(
    "agent",
    {
        "agent": Builtin("ludic.agents:Agent", "One model call per turn."),
        "tool": Builtin("ludic.agents:ToolAgent", "A model that may call tools before it acts."),
        "react": Builtin(
            "ludic.agents:ReActAgent", "A bounded loop of tool calls whose last round answers."
        ),
    },
    "ludic.agents",
    base="ludic.agents:Agent",
)
PROTOCOLS = Registry(
    "protocol",
    {
        "single_agent": Builtin(
            "ludic.interaction.factories:single_agent_protocol", "One agent, one environment."
        ),
        "multi_agent": Builtin(
            "ludic.interaction.factories:multi_agent_protocol",
            "Several seats, in turns or at once; some may be bots or other models.",
        ),
        "delegating": Builtin(
            "ludic.interaction.factories:delegating_protocol",
            "A parent hands subtasks to sub-agents; all their rollouts are linked.",
        ),
    },
    "ludic.protocols",
    base="ludic.interaction.base:InteractionProtocol",
)
TOOLS = Registry("tool", {}, "ludic.tools")

register_env, unregister_env = ENVS.register, ENVS.unregister
register_agent, unregister_agent = AGENTS.register, AGENTS.unregister
register_protocol, unregister_protocol = PROTOCOLS.register, PROTOCOLS.unregister
register_tool, unregister_tool = TOOLS.register, TOOLS.unregister
list_envs, list_agents = ENVS.describe, AGENTS.describe
list_protocols, list_tools = PROTOCOLS.describe, TOOLS.describe


def make_env(name: str, /, **kwargs: Any) -> Any:
    """The environment of that name, built with `kwargs`."""
    return ENVS.make(name, **kwargs)


def make_agent(name: str, /, **kwargs: Any) -> Any:
    """The agent of that name, built with `kwargs`."""
    return AGENTS.make(name, **kwargs)


def make_protocol(name: str, runtime: Any, /, **kwargs: Any) -> Any:
    """The protocol of that name; its factory is called as `factory(runtime, **kwargs)`."""
    return PROTOCOLS.make(name, runtime, **kwargs)


def get_tool(name: str) -> Callable[..., Any]:
    """The tool of that name: the function itself."""
    return TOOLS.get(name)
