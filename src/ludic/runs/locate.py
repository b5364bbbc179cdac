"""Finding what a command is about: a run folder, a run file, or the name of a built-in run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ludic.errors import ConfigError
from ludic.runs.assemble import make_importable
from ludic.runs.settings import RunConfig, load_run
from ludic.runs.storage.folder import RunFolder

RUNS = Path(__file__).parent / "files"


def builtin_runs() -> str:
    """Returns the names of the built-in runs, for a message."""
    return ", ".join(sorted(path.stem for path in RUNS.glob("*.toml")))


def find_run(run: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path]:
    """Reads a run by its file or built-in name; also returns the folder of its modules."""
    path = Path(run)
    if path.suffix == ".toml" or path.exists():
        return load_run(path, overrides), path.resolve().parent
    path = RUNS / f"{run.replace('_', '-')}.toml"
    if not path.is_file():
        raise ConfigError(
            f"there is neither a run file {run!r} nor a built-in run of that name "
            f"({builtin_runs()})"
        )
    return load_run(path, overrides), Path.cwd()


def locate(run: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path | None]:
    """Returns the run's configuration and, if `run` is a run folder, its trained weights. Makes the
    modules that the run names importable."""
    if Path(run).is_dir():
        folder = RunFolder.open(run)
        make_importable(folder.modules)
        return folder.config(overrides), folder.weights()
    config, modules = find_run(run, overrides)
    make_importable(modules)
    return config, None
