"""Finding what a command is about: a run folder, a run file, or the name of a built-in run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ludic.runs.assemble import make_importable
from ludic.runs.settings import RunConfig, apply_override, check_run, load_run
from ludic.runs.folder import RunFolder
from ludic.errors import ConfigError

RUNS = Path(__file__).parent / "files"


def builtin_runs() -> str:
    """The names that `ludic train` knows."""
    return ", ".join(sorted(path.stem for path in RUNS.glob("*.toml")))


def find_run(run: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path]:
    """A run by file, or by the name of a built-in one; and the folder that its modules lie in."""
    path = Path(run)
    if path.suffix != ".toml" and not path.exists():
        path = RUNS / f"{run.replace('_', '-')}.toml"
        if not path.is_file():
            raise ConfigError(
                f"there is no run file {run!r}, nor a built-in run of that name ({builtin_runs()})"
            )
        return load_run(path, overrides), Path.cwd()
    return load_run(path, overrides), path.resolve().parent


def locate(run: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path | None]:
    """The configuration, and the trained weights where `run` is the folder of one."""
    if not Path(run).is_dir():
        config, beside = find_run(run, overrides)
        make_importable(beside)
        return config, None
    config, folder = open_folder(run, overrides)
    return config, folder.weights()


def open_folder(run: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, RunFolder]:
    """The configuration of the run in a folder, whose modules can then be imported."""
    folder = RunFolder.open(run)
    data = folder.read_json("run.json")
    for override in overrides:
        apply_override(data, override)
    config = check_run(data, source=str(folder.path / "run.json"))
    make_importable(Path(folder.read_json("origin.json").get("run_file_folder", ".")))
    return config, folder
