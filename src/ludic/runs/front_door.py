"""The front door: `ludic.train` and its siblings, for scripts and notebooks.

Each blocks until it is done, wherever it is called from. The command is a shell over the same
functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludic.envs import build_env
from ludic.errors import ConfigError
from ludic.eval import EvalReport
from ludic.plumbing.arguments import misfit
from ludic.plumbing.given import bind_objects
from ludic.runs.episodes import import_user_modules
from ludic.runs.interruption import blocking
from ludic.runs.locate import locate
from ludic.runs.playing import evaluate_model, play_by_hand, watch_model
from ludic.runs.results.terminal import show_episode
from ludic.runs.run import Run
from ludic.runs.settings import RunConfig
from ludic.runs.settings.from_python import Tables, given_again, read_arguments, script_folder
from ludic.runs.settings.reading import builtin_run
from ludic.runs.storage import RunFolder
from ludic.types import EnvSpec, Rollout


def train(env: Any, **settings: Any) -> Run:
    """Trains an agent on `env`, and returns the finished run; its `report` says how it went.

    `env` is an environment's class, a function that makes one, a name, an `EnvSpec`, or several of
    them as a list or as a dict with their weights. `model` is "tiny", a name on the hub, a folder,
    an earlier run's folder, or a loaded `(model, tokenizer)`. The other arguments are those of
    `Run`. With a `cluster` it is launched, as `ludic launch` does it.
    """
    return _finished(_made(env, settings))


def sft(env: Any, **settings: Any) -> Run:
    """Only the supervised part of a run: give `sft={"teacher": …}` or `sft={"data": …}`. The other
    arguments are those of `Run`."""
    if settings.get("sft") is None:
        raise ConfigError("give the cold start as sft={'teacher': function} or sft={'data': file}")
    if settings.pop("steps", None):
        raise ConfigError("steps= is the number of RL updates: set sft={'steps': …}")
    return _made(env, {**settings, "steps": 0}).go()


def resume(
    folder: str | Path | Run,
    *,
    steps: int | None = None,
    loggers: Sequence[str] | None = None,
    **parts: Any,
) -> Run:
    """Resumes a run that was stopped, or a finished one for more `steps` in all.

    Parts that were objects of a script, which its folder cannot hold, must be given again, under
    the names they had: `env=`, `model=`, `algorithm=`, `parser=`, `protocol=`, `reference=`,
    `teacher=`, `player=`, `training=`, `sft=`, `eval=`.
    """
    if isinstance(folder, Run):
        parts = {**folder.given, **parts}
        folder = folder.folder.path
    overrides = [] if steps is None else [f"training.steps={steps}"]
    if loggers is not None:
        overrides.append(f"logging.loggers={list(loggers)}")
    return _finished(Run.from_folder(folder, overrides, **parts))


def evaluate(run: Any, *, episodes: int | None = None, **settings: Any) -> EvalReport:
    """Plays held-out episodes and returns the rates with their intervals.

    `run` is a `Run`, a run folder or a run file; or an environment, and then the other arguments
    are those of `Run`: `evaluate(Guess, model="runs/first", parser=…)`.
    """
    config, weights, objects, name = _subject(run, settings)
    if episodes is not None:
        held_out = config.eval.model_copy(update={"episodes": episodes})
        config = config.model_copy(update={"eval": held_out})
    with bind_objects(objects):
        return blocking(lambda: evaluate_model(config, weights, name=name))


def play(env: Any, *, model: Any = None, seed: int = 0, **settings: Any) -> list[Rollout]:
    """Lets you play `env` at the keyboard; or, with a run, its folder or any other `model`, shows
    an episode that the model plays, and returns its rollouts."""
    tables = Tables({"env": env})
    section = tables.data["env"][0]
    spec = EnvSpec(section["kind"], section.get("kwargs") or {})
    with bind_objects(tables.objects):
        if model is None:
            play_by_hand(build_env(spec), seed=seed)
            return []
        if isinstance(model, Run):
            config, weights, given, _ = _subject(model, {})
        elif isinstance(model, str | Path) and (Path(model) / "run.json").is_file():
            config, weights, given, _ = _subject(model, {**settings, "env": env})
        else:
            config, given = read_arguments({**settings, "env": env, "model": model})
            weights = None
    with bind_objects({**tables.objects, **given}):
        rollouts = blocking(lambda: watch_model(spec, config, weights, seed=seed))
    show_episode(rollouts)
    return rollouts


def _made(env: Any, settings: dict[str, Any]) -> Run:
    if complaint := misfit(Run, (env,), settings):
        raise ConfigError(f"a run: {complaint}")
    return Run(env, **settings)


def _finished(run: Run) -> Run:
    """Trains a run; one with a `cluster` in processes of its own, and returns it as they left
    it."""
    if run.config.cluster is None:
        return run.go()
    from ludic.runs.pipeline.attaching import launch_run  # which needs the extra `redis`

    launch_run(run)
    finished = Run.from_folder(run.folder.path)
    finished.read_reports()
    return finished


def _refuse(settings: dict[str, Any], run: str) -> None:
    if settings:
        raise ConfigError(f"{run} has its own settings: {min(settings)}= cannot be given as well")


def _subject(
    run: Any, settings: dict[str, Any]
) -> tuple[RunConfig, Path | None, dict[str, Any], str]:
    """What is to be evaluated: a run, its folder or file, or an environment with its settings."""
    if isinstance(run, Run):
        _refuse(settings, "the run")
        begun = run.folder.has("run.json")
        return run.config, run.folder.weights() if begun else None, run.objects, run.config.run.name
    if isinstance(run, str | Path):
        path = Path(run)
        if (path / "run.json").is_file():
            objects = given_again(RunFolder.open(path).config(), settings)
            with bind_objects(objects):
                return *locate(path), objects, str(run)
        is_builtin = not settings and "-" in str(run) and builtin_run(str(run)).is_file()
        if path.suffix == ".toml" or is_builtin:
            _refuse(settings, str(run))
            return *locate(run), {}, str(run)
    config, objects = read_arguments({"env": run, **settings})
    with bind_objects(objects):
        import_user_modules(config, script_folder())
    return config, None, objects, config.run.name


for _function in (train, sft):
    _function.__signature__ = inspect.signature(Run)  # type: ignore[attr-defined]
