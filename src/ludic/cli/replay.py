"""`ludic replay`: recorded episodes run again, observation by observation or token by token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def replay(
    rollouts: Annotated[Path, typer.Argument(help="A file of rollouts.")],
    limit: Annotated[int, typer.Option(min=1, help="At most this many episodes.")] = 100,
    model: Annotated[
        Path | None,
        typer.Option(help="Also sample again with this run folder's model, token by token."),
    ] = None,
) -> None:
    """Run recorded episodes again and report the first divergence."""
    from ludic.runs.playing import replay_file
    from ludic.runs.results.terminal import say

    found = asyncio.run(replay_file(rollouts, limit=limit, model=model, on_divergence=say))
    what = f"{found.steps} steps" + (f", {found.tokens} tokens" if model else "")
    say(f"{found.same} of {found.episodes} episodes are the same again ({what} compared)")
    if found.others:
        say(f"{found.others} episodes were played with other models too, and cannot be run again")
    raise SystemExit(1 if found.diverged else 0)
