"""Trying an environment by hand: a person at the keyboard takes the agents' place."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from ludic.envs.env import LudicEnv
from ludic.envs.running.runner import EnvRunner
from ludic.plumbing.text import visible
from ludic.types import StepOutcome


def play_by_hand(
    env: LudicEnv[Any, Any, Any],
    *,
    seed: int | None = None,
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
) -> int:
    """Plays one episode with actions read from `stdin`, one line each; an empty line or the end
    of the input stops. Returns the exit status: 0 when the episode ended, 1 when it was left."""
    return asyncio.run(_play(env, seed, stdin or sys.stdin, stdout or sys.stdout))


async def _play(
    env: LudicEnv[Any, Any, Any], seed: int | None, stdin: TextIO, stdout: TextIO
) -> int:
    runner = EnvRunner(env, step_timeout_s=None)
    totals: dict[str, float] = {}
    try:
        openings = await runner.reset(seed)
        totals = dict.fromkeys(runner.agent_ids, 0.0)
        for agent in runner.agent_ids:
            prompt = runner.suggested_sysprompt(agent)
            if prompt:
                _print(f"[{agent}] {prompt}\n", stdout)
        picture = env.picture()
        for agent, (obs, _) in openings.items():
            _print(f"[{agent}]\n{obs if picture is None else picture}", stdout)
        while not runner.done:
            actions = {}
            for agent in runner.active_agents:
                _print(f"[{agent}] > ", stdout, end="")
                line = stdin.readline().strip()
                if not line:
                    _print("\nleft before the end", stdout)
                    return 1
                actions[agent] = line
            outcomes = await runner.step(actions)
            _show(outcomes, None if picture is None else env.picture(), stdout)
            for agent, outcome in outcomes.items():
                totals[agent] += outcome.reward
    finally:
        await runner.close()
    for agent, total in totals.items():
        _print(f"[{agent}] total reward {total:g}", stdout)
    return 0


def _print(text: str, stdout: TextIO, end: str = "\n") -> None:
    """Everything goes this way: an environment's words must not steer the terminal."""
    print(visible(text), end=end, file=stdout, flush=True)


def _show(outcomes: Mapping[str, StepOutcome], picture: str | None, stdout: TextIO) -> None:
    for agent, outcome in outcomes.items():
        ending = "terminated" if outcome.terminated else "truncated" if outcome.truncated else ""
        parts = [f"[{agent}]"]
        if outcome.reward or ending:
            parts.append(f"reward {outcome.reward:g}")
        if outcome.reward_components:
            parts.append(", ".join(f"{k} {v:g}" for k, v in outcome.reward_components.items()))
        if ending:
            parts.append(ending)
        obs = outcome.obs if picture is None else picture
        if obs:
            _print(" ".join(parts) + "\n" + obs, stdout)
        elif len(parts) > 1:
            _print(" ".join(parts), stdout)
