"""Environments of Gymnasium, with words for actions and text for observations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import compress
from typing import Any, Literal, TypeAlias

from ludic.envs.adapters import load_package, plain, refuse_stored
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError, EnvError
from ludic.plumbing.lazy import resolve
from ludic.types import Action, Info, Obs, StepOutcome

ObservationFunction: TypeAlias = Callable[[Any, Mapping[str, Any]], str]
"""Text for the agent, from an observation of Gymnasium's and the info that came with it."""

WORDS: Mapping[str, Sequence[str]] = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""What the numbers mean in the environments that come with Gymnasium and can be played as text."""

_COLOURED = re.compile(r"\x1b\[([0-9;]+)m([^\x1b]*)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_COLOURS = ("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


@dataclass(eq=False, repr=False)
class GymnasiumEnv(SingleAgentEnv):
    """An environment of Gymnasium by its `id`, with its own rewards.

    `terminated` and `truncated` (a time limit, say) are Gymnasium's; where it sets both, the
    episode was over. An action that is not one of the words is not a move: the environment is not
    stepped, the agent is told the words, and `info["illegal"]` is set.

    Args:
        id: As `gymnasium.make` takes it; `module:Name-v0` imports the module first.
        make: Further arguments of `gymnasium.make`, such as `{"is_slippery": False}`.
        actions: Words for a Discrete space's actions, in the order of their numbers; for a
            MultiDiscrete one a list of words per part, which are said one after another. By
            default the numbers themselves, and the usual words of the toy_text environments.
        observation: "ansi" is the rendered text, "text" the observation as Python prints it,
            `module:function` a function of the observation and its info. By default "ansi" where
            the environment can render it, else "text".
        colours: What becomes of the rendered text's colours, which may be all that shows where the
            player is: "mark" writes a highlighted part as `[S]` and a coloured one as `B(blue)`,
            "drop" leaves them out.
        show_actions: Adds the possible actions to each observation. If the info has an
            `action_mask`, only the allowed ones.
        illegal_reward: For an action that is not one of the words.
        system_prompt: Suggested to the agent instead of a sentence about the actions.
    """

    id: str
    _: KW_ONLY
    make: Mapping[str, Any] | None = None
    actions: Sequence[Any] | None = None
    observation: str | ObservationFunction | None = None
    colours: Literal["mark", "drop"] = "mark"
    show_actions: bool = False
    illegal_reward: float = 0.0
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if ":" in self.id:
            refuse_stored(f"Gymnasium's {self.id!r}", "import its module, and name it without one")
        self._gymnasium = load_package("gymnasium", "gymnasium")
        self._make = dict(self.make or {})
        if self.colours not in ("mark", "drop"):
            raise ConfigError(f"colours={self.colours!r}: must be 'mark' or 'drop'")
        self._observation = self._chosen()
        self._env = self._made()
        words = self.actions or WORDS.get(getattr(self._env.spec, "name", ""))
        self._actions = _actions_of(self._env.action_space, words, self.id)
        self._obs: Any = None
        self._info: Mapping[str, Any] = {}

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self._obs, self._info = self._env.reset(seed=seed)
        self._over = False
        return self.env_current_obs(), plain(self._info)

    def env_step(self, action: Action) -> StepOutcome:
        move = self._actions.read(action)
        if move is None:
            note = f"{action.strip()[:80]!r} is not an action. Actions: {self._actions.in_words()}"
            return StepOutcome(
                f"{note}\n\n{self.env_current_obs()}", self.illegal_reward, info={"illegal": True}
            )
        self._obs, reward, terminated, truncated, self._info = self._env.step(move)
        self._over = bool(terminated or truncated)
        return StepOutcome(
            self.env_current_obs(),
            float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated and not terminated),
            info=plain(self._info),
        )

    def env_current_obs(self) -> Obs:
        if callable(self._observation):
            text = self._observation(self._obs, self._info)
            if not isinstance(text, str):
                raise EnvError(f"the observation function of {self.id} returned {text!r}: no text")
        elif self._observation == "ansi":
            text = without_colours(str(self._env.render()), mark=self.colours == "mark")
            text = text.strip("\n")
        else:
            text = self._obs if isinstance(self._obs, str) else str(plain(self._obs))
        if self.show_actions and not self._over:
            mask = self._info.get("action_mask")
            text += f"\nActions: {self._actions.in_words(None if mask is None else plain(mask))}"
        return text

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        if self.system_prompt is not None:
            return self.system_prompt
        return f"You play {self.id}. Answer with one action: {self._actions.in_words()}."

    def close(self) -> None:
        self._env.close()

    def _chosen(self) -> Any:
        observation = self.observation
        if observation in (None, "ansi", "text") or callable(observation):
            return observation
        refuse_stored(f"the observation function {observation!r}", "give the function itself")
        try:
            return resolve(str(observation))
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"observation={observation!r} is neither 'ansi' nor 'text', nor a function as "
                f"module:function: {error}"
            ) from error

    def _made(self) -> Any:
        """The environment, rendering as text if that is wanted and it can."""
        errors = self._gymnasium.error
        try:
            env = self._gymnasium.make(self.id, **self._make)
            modes = env.metadata.get("render_modes") or ()
            if self._observation is None:
                self._observation = "ansi" if "ansi" in modes else "text"
            if self._observation == "ansi" and "render_mode" not in self._make:
                if "ansi" not in modes:
                    raise ConfigError(
                        f"{self.id} does not render as text (it can: {list(modes)}): set "
                        "observation='text', or to a function as module:function"
                    )
                env.close()
                env = self._gymnasium.make(self.id, render_mode="ansi", **self._make)
        except errors.DependencyNotInstalled as error:
            raise ConfigError(f"Gymnasium's {self.id!r} needs another package: {error}") from error
        except (errors.Error, ImportError, TypeError) as error:
            raise ConfigError(f"Gymnasium cannot make {self.id!r}: {error}") from error
        return env


def without_colours(text: str, *, mark: bool) -> str:
    """Rendered text without escape codes. With `mark`, what they coloured still shows.

    >>> without_colours("\\x1b[41mS\\x1b[0mFF\\x1b[34;1mB\\x1b[0m", mark=True)
    '[S]FFB(blue)'
    """
    while mark and (coloured := _COLOURED.search(text)):
        codes = [int(code) for code in coloured[1].split(";") if code]
        if any(40 <= code % 60 < 48 for code in codes):
            marked = f"[{coloured[2]}]"
        else:
            colour = next((_COLOURS[c % 10] for c in codes if 30 <= c % 60 < 38), "")
            marked = f"{coloured[2]}({colour})" if colour else coloured[2]
        text = text[: coloured.start()] + marked + text[coloured.end() :]
    return _ESCAPE.sub("", text)


class _Discrete:
    """A word for each of `size` numbers from `start`; by default the numbers themselves."""

    def __init__(self, words: Sequence[Any] | None, size: int, start: int, id: str) -> None:
        numbers = range(start, start + size)
        names = [str(word) for word in (numbers if words is None else words)]
        if len(names) != size or len({w.strip().lower() for w in names}) != size:
            raise ConfigError(f"actions={names}: {id} wants {size} different words, one per action")
        self._words = tuple(names)
        self._numbers = {word.lower(): number for word, number in zip(names, numbers, strict=True)}

    def read(self, action: str) -> int | None:
        return self._numbers.get(action.strip().lower())

    def in_words(self, mask: Sequence[int] | None = None) -> str:
        if mask is None or len(mask) != len(self._words):
            return ", ".join(self._words)
        return ", ".join(compress(self._words, mask))


class _MultiDiscrete:
    """One word per part, one after another."""

    def __init__(self, parts: Sequence[_Discrete], numpy_type: Any) -> None:
        self._parts, self._type = parts, numpy_type

    def read(self, action: str) -> Any:
        words = re.split(r"[\s,]+", action.strip())
        if len(words) != len(self._parts):
            return None
        numbers = [part.read(word) for part, word in zip(self._parts, words, strict=True)]
        if None in numbers:
            return None
        import numpy as np

        return np.asarray(numbers, dtype=self._type)

    def in_words(self, mask: Sequence[int] | None = None) -> str:
        return ", then ".join(f"one of {part.in_words()}" for part in self._parts)


class _Text:
    """The action itself, where the space has it."""

    def __init__(self, space: Any) -> None:
        self._space = space

    def read(self, action: str) -> str | None:
        return action if self._space.contains(action) else None

    def in_words(self, mask: Sequence[int] | None = None) -> str:
        return f"a text of {self._space.min_length} to {self._space.max_length} characters"


def _actions_of(space: Any, words: Sequence[Any] | None, id: str) -> Any:
    kind = type(space).__name__
    if kind == "Text":
        return _Text(space)
    if kind == "Discrete":
        return _Discrete(words, int(space.n), int(space.start), id)
    if kind == "MultiDiscrete" and space.nvec.ndim == 1:
        sizes, starts = space.nvec.tolist(), space.start.tolist()
        if words is not None and len(words) != len(sizes):
            raise ConfigError(
                f"actions has words for {len(words)} parts; an action of {id} has {len(sizes)}"
            )
        parts = [
            _Discrete(None if words is None else words[i], size, start, id)
            for i, (size, start) in enumerate(zip(sizes, starts, strict=True))
        ]
        return _MultiDiscrete(parts, space.dtype)
    raise ConfigError(
        f"the actions of {id} are {space}, for which there are no words: Discrete, MultiDiscrete "
        "and Text spaces can be played; wrap the environment in one of those"
    )
