"""`ludic generate`: rollouts on disk, filtered by rejection, as data to train on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from ludic.cli.arguments import Overrides, Run


def generate(
    run: Run,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("rollouts.jsonl.zst"),
    episodes: Annotated[int, typer.Option(help="How many episodes to play.")] = 256,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="success, complete or parsed; may be repeated. All must hold."),
    ] = None,
) -> None:
    """Write rollouts, filtered by rejection, as data that `ludic sft` takes."""
    from ludic.runs.playing import generate_file
    from ludic.runs.results.terminal import say

    counts = asyncio.run(
        generate_file(run, overrides or [], output=output, episodes=episodes, keep=keep or [])
    )
    dropped = ", ".join(f"{n} {reason}" for reason, n in counts.items() if reason != "kept")
    say(
        f"wrote {counts['kept']} of {counts.total()} rollouts to {output}"
        + (f"; dropped: {dropped}" if dropped else "")
    )
