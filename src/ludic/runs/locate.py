"""Finding what a command is about: a run folder, a run file, or the name of a built-in run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ludic.errors import ConfigError
from ludic.plumbing.given import is_bound
from ludic.runs.episodes import import_user_modules
from ludic.runs.results.terminal import command_name
from ludic.runs.settings import RunConfig, find_run
from ludic.runs.settings.from_python import given_names
from ludic.runs.storage import RunFolder
from ludic.sharding.ranks import launched


def read_run(
    run: str | Path, overrides: Sequence[str] = ()
) -> tuple[RunConfig, Path, RunFolder | None]:
    """Reads a run by its folder, file or built-in name; also returns the folder of its modules, and
    the run folder if it is one."""
    if os.path.isdir(run):
        folder = RunFolder.open(run)
        return folder.config(overrides), folder.modules, folder
    return *find_run(str(run), overrides), None


def locate(run: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path | None]:
    """Returns the run's configuration and, if `run` is a run folder, its trained weights. Makes the
    modules that the run names importable."""
    config, modules, folder = read_run(run, overrides)
    weights = folder.weights() if folder is not None else None
    import_user_modules(config, modules)
    if folder is not None:
        check_given(config, str(run))
    return config, weights


def check_given(config: RunConfig, run: str) -> None:
    """Raises if a run names objects of a script that are not in use here."""
    missing = {
        path: name for path, name in given_names(config.plain()).items() if not is_bound(name)
    }
    if missing:
        alone = len(config.env) == 1  # then it has no number in a run file
        places = ", ".join(p.replace("env.0.", "env.", 1) if alone else p for p in missing)
        raise ConfigError(
            f"{run} was started from a script with Python objects that no file holds "
            f"({places}): resume from Python and pass them again, as in "
            f"{_resuming(run, missing)}"
        )


def how_to_resume(config: RunConfig, run: Path) -> str:
    """Returns what to do with a run that was stopped, as the end of a sentence."""
    if not config.training.resumable:
        return f"it is not resumable: start another from its weights, with model.name={run}"
    return f"resume it with: {_resume_command(config, str(run))}"


def _resume_command(config: RunConfig, run: str) -> str:
    """The command that resumes a run, or the call from Python where it needs its objects."""
    given = given_names(config.plain())
    if given:
        return _resuming(run, given)
    ranks = launched().size
    if config.cluster is not None and os.environ.get("LUDIC_LAUNCHED"):
        return f"{command_name()} launch --resume {run}"
    command = command_name() if ranks == 1 else "torchrun … -m ludic"
    return f"{command} train --resume {run}"


def _resuming(run: str, paths: Iterable[str]) -> str:
    names = dict.fromkeys(
        "parser" if path.startswith("protocol.kwargs.parser") else path.partition(".")[0]
        for path in paths
    )
    return f"ludic.resume({run!r}, {', '.join(f'{name}=…' for name in names)})"
