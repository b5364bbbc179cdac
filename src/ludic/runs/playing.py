"""One episode for a person to play, or to watch a run's model play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from ludic.runs.assemble import open_policy
from ludic.runs.episodes import inference_spec, make_importable, rollout_engine
from ludic.runs.locate import locate
from ludic.runs.requests import requests_of
from ludic.runs.settings import RunConfig, apply_override
from ludic.runs.storage.folder import RunFolder
from ludic.seeding import derive_seed
from ludic.types import EnvSpec, Rollout


def env_to_play(env: str, settings: Sequence[str]) -> EnvSpec:
    """Finds an environment by name, or that of a run folder. `settings` (key=value) are
    its arguments."""
    make_importable(Path.cwd())
    options: dict[str, Any] = {}
    for setting in settings:
        apply_override(options, setting)
    if Path(env).is_dir():
        folder = RunFolder.open(env)
        make_importable(folder.modules)
        config = folder.config()
        section = (config.eval.env or config.env)[0]
        env, options = section.kind, {**section.kwargs, **options}
    return EnvSpec(env, options)


async def watch(env: EnvSpec, run: str, *, seed: int) -> list[Rollout]:
    """Plays one episode of `env` with the run's model."""
    return await watch_model(env, *locate(run), seed=seed)


async def watch_model(
    env: EnvSpec, config: RunConfig, weights: Path | None, *, seed: int
) -> list[Rollout]:
    """Plays one episode of `env` with the model that a configuration describes."""
    mixes = (requests_of(config), requests_of(config, held_out=True))
    known = {request.env.kind: request for mix in mixes for request, _ in mix.values()}
    request = known.get(env.kind) or next(iter(known.values()))
    kwargs = {**(request.env.kwargs if env.kind in known else {}), **env.kwargs}
    request = structs.replace(
        request,
        env=EnvSpec(env.kind, kwargs),
        env_seed=derive_seed(seed, "play"),
        sampling_seed=derive_seed(seed, "play", "sampling"),
    )
    async with open_policy(config, weights=weights) as policy:
        runtime = replace(policy.runtime, inference=inference_spec(config, trained_on=False))
        return await rollout_engine(config, runtime).generate_rollouts(
            [request], max_steps=config.training.max_steps
        )
