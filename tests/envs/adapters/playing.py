"""Scripted episodes through the runner that every protocol uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ludic.envs import EnvRunner
from ludic.envs.env import LudicEnv
from ludic.types import StepOutcome

Player = Callable[[str], str]


async def play(
    env: LudicEnv[Any, Any, Any], actions: Sequence[str] | Player, *, seed: int | None = 0
) -> list[dict[str, StepOutcome]]:
    """The outcomes of an episode whose active agents say `actions` in turn; the opening counts as
    an outcome without a reward."""
    runner = EnvRunner(env, step_timeout_s=60)
    try:
        openings = await runner.reset(seed)
        heard = {agent: obs for agent, (obs, _) in openings.items()}
        found = [{agent: StepOutcome(obs, 0.0) for agent, obs in heard.items()}]
        said = 0
        while not runner.done:
            (agent,) = runner.active_agents
            if callable(actions):
                action = actions(heard[agent])
            elif said < len(actions):
                action = actions[said]
            else:
                break
            said += 1
            outcomes = dict(await runner.step({agent: action}))
            heard |= {a: o.obs for a, o in outcomes.items()}
            found.append(outcomes)
        return found
    finally:
        await runner.close()


async def alone(
    env: LudicEnv[Any, Any, Any], actions: Sequence[str] | Player, *, seed: int | None = 0
) -> list[StepOutcome]:
    """The same for an environment with one agent."""
    return [next(iter(outcomes.values())) for outcomes in await play(env, actions, seed=seed)]
