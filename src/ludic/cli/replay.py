"""`ludic replay`: recorded episodes run again, observation by observation or token by token."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import groupby, islice
from pathlib import Path

from ludic.errors import ConfigError, RolloutError, UnknownNameError
from ludic.interaction import Runtime
from ludic.rollouts import read_rollouts
from ludic.rollouts import replay as replay_episode
from ludic.runs.assemble import make_importable, open_policy
from ludic.runs.locate import locate
from ludic.runs.show import say
from ludic.types import Rollout


def replay(path: Path, *, limit: int, model: Path | None) -> None:
    """Replays up to `limit` episodes; a divergence is exit code 1."""
    if not path.is_file():
        raise ConfigError(f"there is no file of rollouts at {path}")
    make_importable(Path.cwd())
    raise SystemExit(asyncio.run(_replay(path, limit, model)))


async def _replay(path: Path, limit: int, model: Path | None) -> int:
    episodes = _episodes(path, limit)
    diverged = steps = tokens = others = 0
    async with AsyncExitStack() as stack:
        runtime: Runtime | None = None
        if model is not None:
            config, weights = locate(str(model))
            policy = await stack.enter_async_context(open_policy(config, weights=weights))
            runtime = policy.runtime
        for rollouts in episodes:
            try:
                report = await replay_episode(rollouts, runtime=runtime)
            except UnknownNameError as exc:
                if exc.kind != "client":
                    raise
                others += 1  # the record has no word of what the other model said
                continue
            except RolloutError as exc:
                say(f"{rollouts[0].episode_id}: cannot be replayed: {exc}")
                diverged += 1
                continue
            steps, tokens = steps + report.steps, tokens + report.tokens
            if report.divergence is not None:
                diverged += 1
                say(f"{rollouts[0].episode_id}: {report.divergence}")
    same = len(episodes) - diverged - others
    what = f"{steps} steps" + (f", {tokens} tokens" if model else "")
    say(f"{same} of {len(episodes)} episodes are the same again ({what} compared)")
    if others:
        say(f"{others} episodes were played with other models too, and cannot be run again")
    return 1 if diverged else 0


def _episodes(path: Path, limit: int) -> list[list[Rollout]]:
    """The file's first episodes, each with the rollouts of all who took part."""
    grouped = groupby(read_rollouts(path), key=lambda rollout: rollout.episode_id)
    return [list(rollouts) for _, rollouts in islice(grouped, limit)]
