"""`ludic play`: a person at the keyboard, or a trained model to watch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from ludic.envs.running.play import play_by_hand
from ludic.registry import make_env
from ludic.runs.assemble import make_importable
from ludic.runs.locate import locate, open_folder
from ludic.runs.settings import apply_override
from ludic.runs.show import episode_text, say
from ludic.types import EnvSpec


def play(env: str, settings: Sequence[str], *, model: Path | None, seed: int) -> None:
    """Plays one episode of an environment, or of that of a run folder. `settings` are arguments
    of the environment, as key=value."""
    make_importable(Path.cwd())
    options: dict[str, Any] = {}
    for setting in settings:
        apply_override(options, setting)
    if Path(env).is_dir():
        config, _ = open_folder(env)
        section = (config.eval.env or config.env)[0]
        env, options = section.kind, {**section.kwargs, **options}
    if model is not None:
        asyncio.run(_watch(EnvSpec(env, options), model, seed))
        return
    raise SystemExit(play_by_hand(make_env(env, **options), seed=seed))


async def _watch(env: EnvSpec, model: Path, seed: int) -> None:
    from ludic.rollouts import RolloutEngine
    from ludic.runs.assemble import inference_spec, open_policy, requests_of
    from ludic.seeding import derive_seed

    config, weights = locate(str(model))
    mixes = (requests_of(config), requests_of(config, held_out=True))
    known = {request.env.kind: request for mix in mixes for request, _ in mix.values()}
    request = known.get(env.kind) or next(iter(known.values()))
    kwargs = {**(request.env.kwargs if env.kind in known else {}), **env.kwargs}
    request = replace(
        request,
        env=EnvSpec(env.kind, kwargs),
        env_seed=derive_seed(seed, "play"),
        sampling_seed=derive_seed(seed, "play", "sampling"),
    )
    async with open_policy(config, weights=weights) as policy:
        runtime = replace(policy.runtime, inference=inference_spec(config, trained_on=False))
        rollouts = await RolloutEngine(runtime=runtime).generate_rollouts(
            [request], max_steps=config.training.max_steps
        )
    for rollout in rollouts:
        say(Text(str(rollout.agent_id), "bold") if len(rollouts) > 1 else "")
        say(episode_text(rollout))
