"""The other way: a Ludic environment for one agent as an environment of Gymnasium."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from ludic.envs.env import LudicEnv
from ludic.envs.running.outcomes import checked_opening, checked_outcomes
from ludic.errors import ConfigError, MissingExtraError

try:
    import gymnasium
except ImportError as error:
    raise MissingExtraError("gymnasium", "gymnasium") from error

_SAMPLED = "".join(map(chr, range(32, 127))) + "\n"


class AnyText(gymnasium.spaces.Text):  # type: ignore[misc]
    """Every text of at most `max_length` characters, of any alphabet. Samples are ASCII."""

    def __init__(self, max_length: int, *, seed: int | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=_SAMPLED, seed=seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class LudicGymnasium(gymnasium.Env):  # type: ignore[misc]
    """Plays a Ludic environment with one agent through Gymnasium's interface.

    Observations are text. Actions are text too, or, with `actions`, the number of one of these
    words. The info is the environment's; the parts of a reward are in `info["reward_components"]`.
    `reset` without a seed goes on in the sequence that the last seed began, as Gymnasium has it.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self,
        env: LudicEnv[Any, Any, Any],
        *,
        actions: Sequence[str] | None = None,
        max_length: int = 100_000,
        render_mode: str | None = None,
    ) -> None:
        self.env = env
        self.render_mode = render_mode
        self.observation_space = AnyText(max_length)
        self._words = None if actions is None else tuple(actions)
        self.action_space = (
            AnyText(max_length)
            if self._words is None
            else gymnasium.spaces.Discrete(len(self._words))
        )
        self._name = type(env).__name__
        self._agent: str | None = None
        self._ended = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**63)) if seed is None else seed
        opening = _finished(self.env.reset(seed=seed))
        ids = tuple(self.env.agent_ids)
        if len(ids) != 1:
            raise ConfigError(
                f"{self._name} has the agents {list(ids)}: Gymnasium's interface is for one"
            )
        (self._agent,) = ids
        self._ended = False
        obs, info = checked_opening(self._name, ids, opening)[self._agent]
        return str(obs), dict(info)

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._agent is None or self._ended:
            raise gymnasium.error.ResetNeeded(f"{self._name}: call reset before step")
        word = str(action) if self._words is None else self._words[int(action)]
        outcomes = checked_outcomes(
            self._name,
            "step",
            (self._agent,),
            (),
            (self._agent,),
            _finished(self.env.step({self._agent: word})),
        )
        outcome = outcomes[self._agent]
        self._ended = outcome.terminated or outcome.truncated
        info = dict(outcome.info)
        if outcome.reward_components:
            info["reward_components"] = dict(outcome.reward_components)
        return str(outcome.obs), outcome.reward, outcome.terminated, outcome.truncated, info

    def render(self) -> str | None:
        if self.render_mode != "ansi" or self._agent is None:
            return None
        return str(self.env.current_obs()[self._agent])

    def close(self) -> None:
        self.env.close()


def _finished(result: Any) -> Any:
    """What the environment returned, awaited if need be."""
    return asyncio.run(_wait(result)) if inspect.isawaitable(result) else result


async def _wait(result: Any) -> Any:
    return await result
