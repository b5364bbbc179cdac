"""Replaying the episodes of a file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from ludic.errors import ConfigError, RolloutError, UnknownNameError
from ludic.interaction import Runtime
from ludic.rollouts import read_rollouts, replay
from ludic.runs.assemble import open_policy
from ludic.runs.episodes import make_importable
from ludic.runs.locate import locate
from ludic.types import Rollout


@dataclass
class ReplayedFile:
    """What came of a file's episodes. `others` are those that another model took part in: the
    file does not have its words."""

    episodes: int = 0
    diverged: int = 0
    others: int = 0
    steps: int = 0
    tokens: int = 0

    @property
    def same(self) -> int:
        return self.episodes - self.diverged - self.others


async def replay_file(
    path: Path, *, limit: int, model: Path | None, on_divergence: Callable[[str], None]
) -> ReplayedFile:
    """Replays the file's first `limit` episodes; with a run folder as `model`, samples again too.
    `on_divergence` is given a line for each episode that is not the same again."""
    episodes = _episodes(path, limit)
    make_importable(Path.cwd())
    found = ReplayedFile(len(episodes))
    async with AsyncExitStack() as stack:
        runtime: Runtime | None = None
        if model is not None:
            config, weights = locate(str(model))
            policy = await stack.enter_async_context(open_policy(config, weights=weights))
            runtime = policy.runtime
        for rollouts in episodes:
            try:
                report = await replay(rollouts, runtime=runtime)
            except UnknownNameError as exc:
                if exc.kind != "client":
                    raise
                found.others += 1
                continue
            except RolloutError as exc:
                problem: object = f"cannot be replayed: {exc}"
            else:
                found.steps += report.steps
                found.tokens += report.tokens
                problem = report.divergence
            if problem is not None:
                found.diverged += 1
                on_divergence(f"{rollouts[0].episode_id}: {problem}")
    return found


def _episodes(path: Path, limit: int) -> list[list[Rollout]]:
    """Reads the file's first episodes, each with the rollouts of all its agents."""
    if not path.is_file():
        raise ConfigError(f"there is no file of rollouts at {path}")
    grouped = groupby(read_rollouts(path), key=lambda rollout: rollout.episode_id)
    return [list(rollouts) for _, rollouts in islice(grouped, limit)]
