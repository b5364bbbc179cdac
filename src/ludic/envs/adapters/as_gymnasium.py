"""The other way: a Ludic environment for one agent as an environment of Gymnasium."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

from ludic.envs.adapters import load_package
from ludic.envs.env import LudicEnv
from ludic.envs.outcomes import checked_opening, checked_outcomes
from ludic.errors import ConfigError

_SAMPLED = "".join(map(chr, range(32, 127))) + "\n"


def as_gymnasium(
    env: LudicEnv[Any, Any, Any],
    *,
    actions: Sequence[str] | None = None,
    max_length: int = 100_000,
    render_mode: str | None = None,
) -> Any:
    """An environment of Gymnasium that plays `env`, which has one agent.

    Observations are text of at most `max_length` characters. Actions are text too, or, with
    `actions`, the number of one of these words. The info is the environment's; the parts of a
    reward are in `info["reward_components"]`. `reset` without a seed goes on in the sequence that
    the last seed began, as Gymnasium has it. `render_mode="ansi"` renders the observation.
    """
    words = None if actions is None else tuple(actions)
    return _gymnasium_class()(env, words, max_length, render_mode)


@cache
def _gymnasium_class() -> Any:
    gymnasium = load_package("gymnasium", "gymnasium")
    base: Any = gymnasium.Env
    text: Any = gymnasium.spaces.Text

    class AnyText(text):  # type: ignore[misc]
        """Text of any alphabet. Samples are ASCII."""

        def __init__(self, max_length: int, *, seed: int | None = None) -> None:
            super().__init__(max_length, min_length=0, charset=_SAMPLED, seed=seed)

        def contains(self, x: Any) -> bool:
            return isinstance(x, str) and len(x) <= self.max_length

    class LudicGymnasium(base):  # type: ignore[misc]
        """A Ludic environment as one of Gymnasium."""

        metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012

        def __init__(
            self,
            env: LudicEnv[Any, Any, Any],
            words: tuple[str, ...] | None,
            max_length: int,
            render_mode: str | None,
        ) -> None:
            self._env, self._name, self._words = env, type(env).__name__, words
            self._agent, self._running = "", False
            self.render_mode = render_mode
            self.observation_space = AnyText(max_length)
            self.action_space = (
                AnyText(max_length) if words is None else gymnasium.spaces.Discrete(len(words))
            )

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            seed = int(self.np_random.integers(2**63)) if seed is None else seed
            opening = _finished(self._env.reset(seed=seed))
            ids = tuple(self._env.agent_ids)
            if len(ids) != 1:
                raise ConfigError(
                    f"{self._name} has the agents {list(ids)}: Gymnasium's interface is for one"
                )
            (self._agent,) = ids
            self._running = True
            obs, info = checked_opening(self._name, ids, opening)[self._agent]
            return obs, dict(info)

        def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
            if not self._running:
                raise gymnasium.error.ResetNeeded(f"{self._name}: call reset before step")
            text = str(action) if self._words is None else self._words[int(action)]
            ids = (self._agent,)
            result = _finished(self._env.step({self._agent: text}))
            outcome = checked_outcomes(self._name, "step", ids, (), ids, result)[self._agent]
            self._running = not (outcome.terminated or outcome.truncated)
            info = dict(outcome.info)
            if outcome.reward_components:
                info["reward_components"] = dict(outcome.reward_components)
            return outcome.obs, outcome.reward, outcome.terminated, outcome.truncated, info

        def render(self) -> str | None:
            if self.render_mode != "ansi" or not self._agent:
                return None
            return str(self._env.current_obs().get(self._agent, ""))

        def close(self) -> None:
            self._env.close()

    return LudicGymnasium


def _finished(result: Any) -> Any:
    """What the environment returned, awaited if need be."""
    return asyncio.run(asyncio.wait_for(result, None)) if inspect.isawaitable(result) else result
