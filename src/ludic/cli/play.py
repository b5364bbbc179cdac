"""`ludic play`: a person at the keyboard, or a trained model to watch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def play(
    env: Annotated[str, typer.Argument(help="An environment's name, or a run folder.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value, for the environment.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Watch the model of this run folder play.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The episode's seed.")] = 0,
) -> None:
    """Play an environment yourself, or watch a model play it."""
    from rich.text import Text

    from ludic.envs import build_env
    from ludic.envs.running.play import play_by_hand
    from ludic.runs.playing import env_to_play, watch
    from ludic.runs.results.terminal import episode_text, say

    spec = env_to_play(env, settings or [])
    if model is None:
        raise SystemExit(play_by_hand(build_env(spec), seed=seed))
    rollouts = asyncio.run(watch(spec, str(model), seed=seed))
    for rollout in rollouts:
        say(Text(str(rollout.agent_id), "bold") if len(rollouts) > 1 else "")
        say(episode_text(rollout))
