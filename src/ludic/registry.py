"""Everything that a run file can name: environments, agents, protocols, tools, bots, parsers,
rewards, contexts, tool parsers and algorithms.

The tables at the end list what is built in; nothing is imported before it is asked for. Scripts
add their own with `register_env` and its siblings, and installed packages announce theirs as entry
points in the groups `ludic.envs`, `ludic.agents` and so on. Anything else is named by its place,
`my_module:MyEnv`.

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
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ludic.arguments import misfit
from ludic.errors import (
    ConfigError,
    DuplicateNameError,
    LudicError,
    MissingExtraError,
    UnknownNameError,
)
from ludic.given import given, is_given
from ludic.lazy import names_are_stored as names_are_stored
from ludic.lazy import resolve
from ludic.lazy import stored_names as stored_names

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

F = TypeVar("F", bound=Callable[..., Any])

_PLACE = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name stands for, with one line about it: the thing itself, or for a built-in its
    place as `module:attribute`."""

    target: str | Callable[..., Any]
    description: str


class Registry:
    """One kind of thing by name: built in, registered in this process, or from entry points.

    Things of a kind with a `base` (itself a place) are named by place only if they are classes
    derived from it; of the other kinds, any callable will do.
    """

    def __init__(
        self, kind: str, builtins: Mapping[str, Entry], group: str, base: str = ""
    ) -> None:
        self.kind, self.group = kind, group
        self._base = base
        self._entries = dict(builtins)

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
            self._entries[name] = Entry(thing, description or _first_line(thing))
            return thing

        return add if factory is None else add(factory)

    def unregister(self, name: str) -> None:
        """Removes a name that this process registered; built-in names stay."""
        registered = [n for n, entry in self._entries.items() if callable(entry.target)]
        if name not in registered:
            raise UnknownNameError(f"registered {self.kind}", name, registered)
        del self._entries[name]

    def get(self, name: str) -> Callable[..., Any]:
        """The factory behind `name`; an `UnknownNameError` suggests the nearest names.

        A name of the form `module:attribute` is imported.
        """
        if is_given(name):
            return given(name, self.kind)  # type: ignore[no-any-return]
        entry, announced = self._entries.get(name), self._announced.get(name, [])
        sources = [self._owner(name)] if entry else []
        sources += [f"the package {_package(point)}" for point in announced]
        if len(sources) > 1:
            raise DuplicateNameError(
                f"{self.kind} {name!r} comes from {' and '.join(map(str, sources))}: "
                "uninstall one of them, or use a factory instead of a name"
            )
        if entry:
            target = entry.target
            return target if callable(target) else _load(f"{self.kind} {name!r}", target)
        if announced:
            return _load(f"{self.kind} {name!r} of {sources[0]}", announced[0].value)
        if _PLACE.fullmatch(name):
            return self._import(name)
        raise UnknownNameError(self.kind, name, self.names())

    def _import(self, place: str) -> Callable[..., Any]:
        """What stands at `module:attribute`. Names also come from stored data, which must not
        get just anything called: there, only a class that is seen to be of this kind will do."""
        stored = names_are_stored()
        if not self._base and stored:
            raise ConfigError(
                f"{self.kind} {place!r} is named by stored data, for which no function is "
                f"imported: register it first, under this name, with `{self._register}`"
            )
        thing: Any = _load(f"{self.kind} {place!r}", place)
        if not self._base or not (stored or isinstance(thing, type)):
            return thing  # type: ignore[no-any-return]
        base: Any = _load(f"the base of every {self.kind}", self._base)
        if isinstance(thing, type) and issubclass(thing, base):
            return thing
        said = "is named by stored data and " if stored else ""
        raise ConfigError(
            f"{self.kind} {place!r} {said}is not a class derived from {base.__name__}: derive it, "
            f"or register a function under a name of its own, with `{self._register}`"
        )

    @property
    def _register(self) -> str:
        return f"register_{self.kind.replace(' ', '_').replace('environment', 'env')}"

    def make(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the factory behind `name`; arguments it does not take are a `ConfigError`."""
        factory = self.get(name)
        try:
            return factory(*args, **kwargs)
        except TypeError as exc:
            # Reading a signature costs more than most factories: only when the call went wrong.
            if complaint := misfit(factory, args, kwargs):
                raise ConfigError(f"{self.kind} {name!r} cannot be made: {complaint}") from exc
            raise

    def make_from(self, spec: str | Mapping[str, Any]) -> Any:
        """What a run file describes: a name, or a mapping of "kind" and the arguments."""
        options = {"kind": spec} if isinstance(spec, str) else dict(spec)
        name = options.pop("kind", None)
        if not isinstance(name, str):
            known = ", ".join(self.names())
            raise ConfigError(f"{self.kind} {spec!r} needs a 'kind', one of: {known}")
        try:
            return self.make(name, **options)
        except TypeError as exc:
            raise ConfigError(f"{self.kind} {name!r} with {options}: {exc}") from exc

    def builtin_name(self, thing: object) -> str | None:
        """The name under which `thing` is built in, if it is."""
        called = f":{getattr(thing, '__name__', '')}"
        places = {n: e.target for n, e in self._entries.items() if isinstance(e.target, str)}
        likely = (n for n, place in places.items() if place.endswith(called))
        return next((name for name in likely if resolve(places[name]) is thing), None)

    def names(self) -> list[str]:
        """Every known name, sorted."""
        return sorted({*self._entries, *self._announced})

    def describe(self) -> dict[str, str]:
        """Every known name with one line about it. A broken package is noted there and does
        not raise."""
        return {name: self._describe(name) for name in self.names()}

    def _describe(self, name: str) -> str:
        if entry := self._entries.get(name):
            return entry.description
        try:
            return _first_line(self.get(name))
        except LudicError as exc:
            return f"(cannot be used: {exc})"

    def _owner(self, name: str) -> str | None:
        entry = self._entries.get(name)
        if entry is None:
            return None
        if isinstance(entry.target, str):
            return "built in"
        module = getattr(entry.target, "__module__", "?")
        return f"registered by {module}.{getattr(entry.target, '__qualname__', '?')}"


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value


def _load(what: str, place: str) -> Callable[..., Any]:
    try:
        thing: Any = resolve(place)
    except MissingExtraError:  # says itself what to install
        raise
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(f"{what} cannot be loaded from {place!r}: {exc}") from exc
    if not callable(thing):
        raise ConfigError(f"{what}: {place!r} cannot be called")
    return thing  # type: ignore[no-any-return]


def _first_line(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    return text.strip().partition("\n")[0]


ENVS = Registry(
    "environment",
    {
        "tic_tac_toe": Entry(
            "ludic.envs.tic_tac_toe:TicTacToeEnv",
            "Tic-Tac-Toe against a seeded opponent: random, perfect or mixed.",
        ),
        "tic_tac_toe_two_player": Entry(
            "ludic.envs.tic_tac_toe:TwoPlayerTicTacToeEnv",
            "Tic-Tac-Toe with an agent on each side, for self-play.",
        ),
        "dataset_qa": Entry(
            "ludic.envs.dataset_qa_env:DatasetQAEnv",
            "One question from a dataset, one judged answer.",
        ),
        "gsm8k": Entry(
            "ludic.envs.datasets.gsm8k:GSM8KEnv",
            "Grade-school word problems, judged by the number.",
        ),
        "math": Entry(
            "ludic.envs.datasets.math:MATHEnv", "Competition problems, judged by symbolic equality."
        ),
        "key_door": Entry(
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
        "agent": Entry("ludic.agents:Agent", "One model call per turn."),
        "tool": Entry("ludic.agents:ToolAgent", "A model that may call tools before it acts."),
        "react": Entry(
            "ludic.agents:ReActAgent", "A bounded loop of tool calls whose last round answers."
        ),
    },
    "ludic.agents",
    base="ludic.agents:Agent",
)
PROTOCOLS = Registry(
    "protocol",
    {
        "single_agent": Entry(
            "ludic.interaction.factories:single_agent_protocol", "One agent, one environment."
        ),
        "multi_agent": Entry(
            "ludic.interaction.factories:multi_agent_protocol",
            "Several seats, in turns or at once; some may be bots or other models.",
        ),
        "delegating": Entry(
            "ludic.interaction.factories:delegating_protocol",
            "A parent hands subtasks to sub-agents; all their rollouts are linked.",
        ),
    },
    "ludic.protocols",
    base="ludic.interaction.base:InteractionProtocol",
)
TOOLS = Registry("tool", {}, "ludic.tools")
BOTS = Registry(
    "bot",
    {
        "random": Entry("ludic.interaction.bots:RandomBot", "One of its choices, at random."),
        "sequence": Entry("ludic.interaction.bots:SequenceBot", "A fixed list of actions."),
    },
    "ludic.bots",
)
PARSERS = Registry(
    "parser",
    {
        "text": Entry("ludic.parsers:text_parser", "The whole answer is the action."),
        "xml": Entry("ludic.parsers:xml_parser", "The action stands in <tag>...</tag>."),
        "think_prefix": Entry(
            "ludic.parsers:think_prefix_parser", "<think>...</think>, and then the action."
        ),
        "boxed": Entry("ludic.parsers:boxed_parser", "The action stands in the last \\boxed{...}."),
        "json": Entry("ludic.parsers:json_parser", "The answer is a JSON object."),
        "regex": Entry("ludic.parsers:regex_parser", "The action is what a pattern matches."),
    },
    "ludic.parsers",
)
REWARDS = Registry(
    "reward",
    {
        "exact": Entry("ludic.rewards:exact_reward", "1 for the target itself."),
        "numeric": Entry("ludic.rewards:numeric_reward", "1 for the target's number."),
        "symbolic": Entry("ludic.rewards:symbolic_reward", "1 for an equal expression."),
        "format": Entry("ludic.rewards:format_reward", "1 for what a parser can read."),
        "length": Entry("ludic.rewards:length_reward", "1 for short answers, 0 for long ones."),
    },
    "ludic.rewards",
)
CONTEXTS = Registry(
    "context",
    {
        "full_dialog": Entry("ludic.context:FullDialog", "The whole dialogue, as it was."),
        "truncated_thinking": Entry(
            "ludic.context:TruncatedThinkingContext", "Earlier turns without their thinking."
        ),
        "windowed": Entry("ludic.context:WindowedDialog", "The last few turns."),
    },
    "ludic.contexts",
)
TOOL_PARSERS = Registry(
    "tool parser",
    {
        "hermes": Entry(
            "ludic.inference.templates.tool_parsers:HermesToolParser",
            "Calls as JSON between <tool_call> and </tool_call>.",
        ),
        "json": Entry(
            "ludic.inference.templates.tool_parsers:JSONToolParser", "Calls as plain JSON."
        ),
    },
    "ludic.tool_parsers",
)
ALGORITHMS = Registry(
    "algorithm",
    {
        name: Entry(f"ludic.training.algorithms.{name}:make_{name}", description)
        for name, description in {
            "reinforce": "the policy gradient with Monte Carlo returns",
            "reinforce_baseline": "REINFORCE minus the batch's mean return",
            "grpo": "group-relative advantages, PPO's clip per token",
            "dr_grpo": "GRPO without division by std or length",
            "gspo": "one clipped ratio per sequence",
            "cispo": "capped importance weights, no token loses its gradient",
            "sapo": "a soft gate in the place of the clip",
            "gmpo": "the geometric mean of clipped ratios",
            "scalerl": "CISPO, hybrid-normalised credit, groups weighing the same",
            "spo": "no groups: a tracked value per task as the baseline",
            "opd": "distillation from a teacher on the student's own samples",
            "sft": "weighted log-likelihood of recorded actions",
        }.items()
    },
    "ludic.algorithms",
)

register_env, unregister_env = ENVS.register, ENVS.unregister
register_agent, unregister_agent = AGENTS.register, AGENTS.unregister
register_protocol, unregister_protocol = PROTOCOLS.register, PROTOCOLS.unregister
register_tool, unregister_tool = TOOLS.register, TOOLS.unregister
register_parser, register_reward = PARSERS.register, REWARDS.register
register_bot = BOTS.register
register_context, register_tool_parser = CONTEXTS.register, TOOL_PARSERS.register
register_algorithm = ALGORITHMS.register
list_envs, list_agents = ENVS.describe, AGENTS.describe
list_protocols, list_tools = PROTOCOLS.describe, TOOLS.describe
list_algorithms, list_tool_parsers = ALGORITHMS.describe, TOOL_PARSERS.names
make_env, make_agent = ENVS.make, AGENTS.make
make_protocol = PROTOCOLS.make  # called as make_protocol(name, runtime, **kwargs)
get_tool = TOOLS.get  # the function itself
