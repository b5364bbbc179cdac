"""Play without training: a run's model evaluated, watched, replayed, or to make data; and an
environment played by hand."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TextIO

from msgspec import structs

from ludic.envs.env import LudicEnv
from ludic.envs.runner import EnvRunner
from ludic.errors import ConfigError, RolloutError, UnknownNameError
from ludic.eval import EvalReport
from ludic.eval.report import USUAL
from ludic.interaction import Runtime
from ludic.plumbing.text import visible
from ludic.rollouts import FixedMix, RolloutWriter, read_rollouts, replay
from ludic.rollouts.storage import write_rollouts
from ludic.runs.check_episodes import check_programs
from ludic.runs.episodes import (
    evaluate_policy,
    inference_spec,
    make_importable,
    requests_of,
    rollout_engine,
)
from ludic.runs.locate import locate
from ludic.runs.model import OnUpdate
from ludic.runs.parts import RunParts
from ludic.runs.ranks import Ranks
from ludic.runs.results.terminal import episodes_bar, warn
from ludic.runs.settings import RunConfig, apply_override, override_key
from ludic.runs.storage import RunFolder, rollout_file
from ludic.seeding import derive_seed
from ludic.types import EnvSpec, FinishReason, Rollout, StepOutcome


@asynccontextmanager
async def open_policy(
    config: RunConfig, *, weights: Path | None = None, on_update: OnUpdate = "finish"
) -> AsyncIterator[RunParts]:
    """Yields what a run that is not trained is made of, for its model: with the weights of a
    checkpoint, and with its client and publisher open. `on_update` is the in-process client's."""
    run = RunParts(config, {}, weights, on_update)
    run.ranks = Ranks()
    async with run.opened():
        yield run


async def evaluate_run(run: str, overrides: Sequence[str] = ()) -> EvalReport:
    """Evaluates the trained model of a run folder, or the untrained one of a run file."""
    config, weights = locate(run, overrides)
    for sentence in _overruled(config, overrides):
        warn(sentence)
    return await evaluate_model(config, weights, name=run)


def _overruled(config: RunConfig, overrides: Sequence[str]) -> list[str]:
    """Says which overrides are of the training alone, since the run has others for its evaluation
    that were left as they are."""
    keys = [override_key(override) for override in overrides]
    own = {
        "env": ("eval.env", bool(config.eval.env)),
        "protocol": ("eval.protocol", config.eval.protocol is not None),
        "inference.sampling.temperature": (
            "eval.temperature",
            config.eval.temperature is not None,
        ),
    }
    return [
        f"{key} has no effect here: the run is evaluated with its {there}, so set "
        f"{there + key.removeprefix(part)}"
        for key in keys
        for part, (there, given) in own.items()
        if given
        and (key == part or key.startswith(f"{part}."))
        and not any(other == there or other.startswith(f"{there}.") for other in keys)
    ]


async def evaluate_model(config: RunConfig, weights: Path | None, *, name: str) -> EvalReport:
    """Evaluates the model that a configuration describes, with the weights of a checkpoint."""
    check_programs(config, held_out=True)
    async with open_policy(config, weights=weights) as opened:
        with episodes_bar("evaluation") as update:
            return await evaluate_policy(config, opened.runtime, name=name, on_progress=update)


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


async def watch_model(
    env: EnvSpec, config: RunConfig, weights: Path | None, *, seed: int
) -> list[Rollout]:
    """Plays one episode of `env` with the model that a configuration describes."""
    mixes = (requests_of(config), requests_of(config, held_out=True))
    by_kind = {request.env.kind: request for mix in mixes for request, _ in mix.values()}
    request = by_kind.get(env.kind) or next(iter(by_kind.values()))
    kwargs = {**(request.env.kwargs if env.kind in by_kind else {}), **env.kwargs}
    request = structs.replace(
        request,
        env=EnvSpec(env.kind, kwargs),
        env_seed=derive_seed(seed, "play"),
        sampling_seed=derive_seed(seed, "play", "sampling"),
    )
    async with open_policy(config, weights=weights) as opened:
        runtime = replace(opened.runtime, inference=inference_spec(config, trained_on=False))
        return await rollout_engine(config, runtime).generate_rollouts(
            [request], max_steps=config.training.max_steps
        )


async def replay_file(
    path: Path, *, limit: int, model: Path | None, on_divergence: Callable[[str], None]
) -> Counter[str]:
    """Replays the file's first `limit` episodes; with a run folder as `model`, samples again too.
    `on_divergence` is given a line for each episode that is not the same again. Returns how many
    episodes were the `same` and how many `diverged`, the `steps` and `tokens` compared, and as
    `others` the episodes that another model took part in: the file does not have its words."""
    episodes = _episodes(path, limit)
    make_importable(Path.cwd())
    counts: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        runtime: Runtime | None = None
        if model is not None:
            config, weights = locate(str(model))
            opened = await stack.enter_async_context(open_policy(config, weights=weights))
            runtime = opened.runtime
        for rollouts in episodes:
            try:
                report = await replay(rollouts, runtime=runtime)
            except UnknownNameError as exc:
                if exc.kind != "client":
                    raise
                counts["others"] += 1
                continue
            except RolloutError as exc:
                problem: object = f"cannot be replayed: {exc}"
            else:
                counts.update(steps=report.steps, tokens=report.tokens)
                problem = report.divergence
            counts["same" if problem is None else "diverged"] += 1
            if problem is not None:
                on_divergence(f"{rollouts[0].episode_id}: {problem}")
    return counts


def _episodes(path: Path, limit: int) -> list[list[Rollout]]:
    """Reads the file's first episodes, each with the rollouts of all its agents."""
    if not path.is_file():
        inside = rollout_file(path / "rollouts", "train")
        hint = f": it is a run folder, name {inside}" if inside.is_file() else ""
        raise ConfigError(f"there is no file of rollouts at {path}{hint}")
    grouped = groupby(read_rollouts(path), key=lambda rollout: rollout.episode_id)
    return [list(rollouts) for _, rollouts in islice(grouped, limit)]


def succeeded(config: RunConfig, rollout: Rollout) -> bool:
    """Whether an episode succeeded, by what the evaluation of the run counts as that."""
    if config.eval.success_above is not None:
        return rollout.total_reward > config.eval.success_above
    steps = rollout.env_steps
    outcome = steps[-1].info.get("result") if steps else None
    if config.eval.outcomes:
        return outcome == config.eval.outcomes[0]
    if outcome is None and steps and steps[-1].terminated:
        raise ConfigError(
            "--keep success: the environment does not say how its episodes end; set "
            "eval.success_above to the reward above which one succeeded, as in eval.success_above=0"
        )
    return outcome in USUAL


KEEP: Mapping[str, Callable[[RunConfig, Rollout], bool]] = {
    "success": succeeded,
    "complete": lambda _, rollout: (
        not rollout.truncated
        and all(step.finish_reason is not FinishReason.LENGTH for step in rollout.agent_steps)
    ),
    "parsed": lambda _, rollout: not any(s.info.get("parse_error") for s in rollout.env_steps),
}
"""The filters by name. A failed episode is never kept, whatever the filter."""


async def generate_file(
    run: str, overrides: Sequence[str], *, output: Path, episodes: int, keep: Sequence[str]
) -> Counter[str]:
    """Plays `episodes` episodes and writes the rollouts that pass every filter in `keep`. Returns
    how many were kept, and how many were dropped, by reason."""
    _check(output, episodes, keep)
    config, weights = locate(run, overrides)
    check_programs(config)
    seed = derive_seed(config.run.seed, "generate")
    counts: Counter[str] = Counter(kept=0)
    async with open_policy(config, weights=weights) as opened:
        engine = rollout_engine(config, opened.runtime, seed=seed)
        requests = FixedMix(requests_of(config), seed=seed).next_requests(episodes)
        with episodes_bar("generating") as update, RolloutWriter(output) as writer:
            async for rollout in engine.stream_rollouts(
                requests,
                max_steps=config.training.max_steps,
                concurrency=config.concurrency,
                on_progress=update,
            ):
                failed = [name for name in keep if not KEEP[name](config, rollout)]
                reason = "failed" if rollout.error else f"not {failed[0]}" if failed else "kept"
                counts[reason] += 1
                if reason == "kept":
                    await write_rollouts(writer, [rollout])
    return counts


def _check(output: Path, episodes: int, keep: Sequence[str]) -> None:
    if episodes < 1:
        raise ConfigError(f"--episodes {episodes}: must be at least 1")
    for name in keep:
        if name not in KEEP:
            raise UnknownNameError("--keep", name, KEEP)
    if output.exists():
        raise ConfigError(f"{output} already exists: name another file with --output")


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
