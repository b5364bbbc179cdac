"""What a run leaves behind: one folder that says what was run, with what, and how it went.

run.json          the resolved configuration
origin.json       versions, git state, machine, command
env_sources.json  the modules of the environments, by which a resume notices changes
metrics.jsonl     one line per step
rollouts/         every episode, compressed, and what the trainer made of its tokens
checkpoints/      resumable state; `latest` names the newest whole one
eval/             reports, one file per stage
summary.json      the figures at the end
.lock             which process trains it
"""

from __future__ import annotations

import ast
import fcntl
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from ludic.errors import ConfigError
from ludic.inference.addresses import without_user
from ludic.plumbing.files import boot_id, replacing
from ludic.registry import ENVS
from ludic.rollouts import RolloutWriter
from ludic.rollouts.lines import CutFileWarning, keep_lines
from ludic.runs.machine import gpu_name, versions
from ludic.runs.settings import RunConfig, apply_override, check_run

EVALUATIONS = ("before", "after_sft", "after_rl")
"""The stages that have one, in order."""


class RunFolder:
    """The files of one run. Writes are atomic: a reader never sees half a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts, self.checkpoints = path / "rollouts", path / "checkpoints"
        self.evals, self.metrics = path / "eval", path / "metrics.jsonl"

    @staticmethod
    def planned(config: RunConfig, path: str | Path | None = None) -> RunFolder:
        """Returns the folder that a new run will have, by its name unless `path` says where. Raises
        for a name that is not one part of a path: it would lie somewhere else."""
        name = config.run.name
        if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
            raise ConfigError(
                f"run.name={name!r} becomes a folder's name, so it cannot contain '/': "
                "choose the place with run.folder or --out (out=)"
            )
        if path is None:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = Path(config.run.folder) / f"{name}-seed{config.run.seed}-{stamp}"
        return RunFolder(Path(path))

    def make(self, config: RunConfig, *, modules: Path) -> None:
        """Makes the folder; one that exists and is not empty is an error. `modules` is the folder
        of the Python modules that the run names."""
        path = self.path
        exists = ConfigError(
            f"{path} exists already: choose another with --out (out=), or resume it with "
            f"`ludic train --resume {path}`"
        )
        if os.path.exists(path) and (not path.is_dir() or any(path.iterdir())):
            raise exists
        try:
            path.mkdir(parents=True, exist_ok=True)
            for part in (self.rollouts, self.checkpoints, self.evals):
                part.mkdir()  # of two that begin at once, one finds it there
        except FileExistsError:
            raise exists from None
        except OSError as exc:
            raise ConfigError(f"cannot create the run folder {path}: {exc.strerror}") from exc
        self.write_json("run.json", config.plain())
        self.write_json("origin.json", {**origin(), "run_file_folder": str(modules.resolve())})

    def abandon(self) -> None:
        """Removes the folder of a run that failed before there was anything to keep; the log of a
        server that did not start is kept beside it."""
        for part in (self.rollouts, self.checkpoints, self.evals):
            if any(part.iterdir()):
                return
        log = self.path / "vllm" / "server.log"
        if log.is_file():
            shutil.copyfile(log, self.path.with_name(f"{self.path.name}-server.log"))
        shutil.rmtree(self.path, ignore_errors=True)

    @staticmethod
    def open(path: str | Path) -> RunFolder:
        """Opens the folder of an existing run."""
        folder = RunFolder(Path(path))
        if not os.path.isfile(folder.path / "run.json"):
            raise ConfigError(f"{path} is not a run folder: it has no run.json")
        return folder

    @property
    def modules(self) -> Path:
        """The folder of the Python modules that the run names."""
        return Path(self.read_json("origin.json").get("run_file_folder") or ".")

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Returns the run's configuration, with overrides applied."""
        data = self.read_json("run.json")
        training = data.get("training", {})
        if training.get("micro_token_budget") and "max_seq_len" in training:
            # Folders from before this was refused hold a smaller one, and trained with the larger.
            budget = max(training["micro_token_budget"], training["max_seq_len"])
            training["micro_token_budget"] = budget
        overridden = [apply_override(data, override) for override in overrides]
        return check_run(data, source=str(self.path / "run.json"), overridden=overridden)

    def take_up(self, config: RunConfig) -> None:
        """Stores `config` as the run's. If its number of steps changed, results of the end are
        removed, to be measured again."""
        if config.training.steps != self.config().training.steps:
            for stale in ("eval/after_rl.json", "summary.json"):
                (self.path / stale).unlink(missing_ok=True)
        self.write_json("run.json", config.plain())

    def weights(self, which: str | None = None) -> Path:
        """Returns the model folder of the newest complete checkpoint, of the last stage with one;
        or of `which`: the stage `sft` or `rl`, or `step-40` of the last stage that has it."""
        stages = [which] if which in ("sft", "rl") else ["rl", "sft"]
        step = which if which and which not in stages else None
        for stage in stages:
            folder = self.checkpoints / stage
            if step is not None:
                model = folder / f"step-{int(step.removeprefix('step-')):08d}" / "model"
                if model.is_dir():
                    return model
            elif (latest := folder / "latest").is_file():
                return folder / latest.read_text(encoding="utf-8").strip() / "model"
        checkpoints = [
            f"{path.parent.name} step-{int(path.name.removeprefix('step-'))}"
            for path in sorted(self.checkpoints.glob("*/step-*"))
        ]
        if which is None or not checkpoints:
            raise ConfigError(f"{self.path} has no checkpoint yet")
        raise ConfigError(
            f"{self.path} has no checkpoint {which!r}; there are: {', '.join(checkpoints)} "
            "(training.keep_checkpoints says how many stay)"
        )

    def has(self, name: str) -> bool:
        """Whether the folder has this file."""
        return (self.path / name).is_file()

    def write_json(self, name: str, value: Mapping[str, Any]) -> Path:
        """Writes a JSON file atomically, and returns its path."""
        target = self.path / name
        try:
            with replacing(target) as temporary:
                temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"cannot write {target}: {exc.strerror}") from exc
        return target

    def read_json(self, name: str) -> dict[str, Any]:
        """Reads a JSON file of the folder."""
        try:
            data: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as exc:
            raise ConfigError(f"cannot read {self.path / name}: {exc}") from exc
        return data


def origin() -> dict[str, Any]:
    """Where a result came from: versions, git, machine and the command."""
    return {
        "versions": versions(),
        "git": _git_state(),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "gpu": gpu_name()},
        "command": [Path(sys.argv[0]).name, *map(without_user, sys.argv[1:])],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _git_state() -> dict[str, Any] | None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder, or raises a `ConfigError` that names the process that has it locked.

    The kernel releases the lock of a process that ended, however it ended. A holder on another
    host may be out of the kernel's sight, so there the file's content counts, unless it was
    written before a reboot of this host.
    """
    path = folder / LOCK
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{_who(folder, _read(file))}: wait until it ends") from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        me = {"pid": os.getpid(), "host": platform.node(), "boot": boot_id(), "since": since}
        holder = _read(file)
        if holder and holder.get("boot") != me["boot"] and holder.get("host") != me["host"]:
            raise ConfigError(
                f"{_who(folder, holder)}, which cannot be seen from this host: if it has ended, "
                f"remove {path}"
            )
        _write(file, json.dumps(me))
        try:
            yield
        finally:
            _write(file, "")


def forget_holder(folder: Path) -> None:
    """Lets another host train the run whose trainer was on a host that is gone. A holder that the
    kernel can see stays."""
    with suppress(OSError), (folder / LOCK).open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write(file, "")


def _who(folder: Path, holder: dict[str, Any]) -> str:
    process = "process {pid} on host {host} since {since}".format_map(holder) if holder else ""
    return f"{folder} is being trained by {process or 'another process'}"


def _read(file: TextIO) -> dict[str, Any]:
    """Returns what the holder wrote: nothing if it released the lock, or is only taking it."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return holder if {"pid", "host", "since"} <= holder.keys() else {}
    except (ValueError, AttributeError):
        return {}


def _write(file: TextIO, text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


def rollout_file(folder: Path, name: str) -> Path:
    """Where a run keeps rollouts: `name`.jsonl.zst, or the .jsonl.gz of a run that began with an
    earlier version."""
    before = folder / f"{name}.jsonl.gz"
    return before if before.is_file() else folder / f"{name}.jsonl.zst"


def token_file(folder: Path) -> Path:
    """Where a run keeps what its trainer made of the tokens of its rollouts."""
    return folder / "train.tokens.jsonl.zst"


def keep_tokenizer(folder: RunFolder, tokenizer: Any) -> None:
    """Saves what the tokens' text is read from, once, beside the rollouts."""
    target = folder.rollouts / "tokenizer.json"
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not target.exists():
        with replacing(target) as temporary:
            temporary.write_text(backend.to_str(), encoding="utf-8")


def open_rollout_log(
    path: Path, step: int, is_settled: Callable[[int], bool] = bool
) -> RolloutWriter:
    """Returns a writer that appends to the episodes of the steps before `step`, or of the units of
    a run over Redis that are settled."""
    with warnings.catch_warnings():
        # A kill may leave half a line, and what it was of is sampled again.
        warnings.simplefilter("ignore", CutFileWarning)
        if path.exists():
            keep_lines(path, lambda row: _is_kept(row["episode_id"], step, is_settled))
        return RolloutWriter(path, append=True)


def _is_kept(episode_id: str, step: int, is_settled: Callable[[int], bool]) -> bool:
    """Episodes are named step-N/… or step-N-round-M/…, and those of actors unit-N/…"""
    if match := re.match(r"unit-(\d+)/", episode_id):
        return is_settled(int(match[1]))
    match = re.match(r"step-(\d+)", episode_id)
    return match is None or int(match[1]) < step


ENV_SOURCES = "env_sources.json"
_STDLIB = Path(inspect.__file__).parent


def note_env_sources(config: RunConfig, folder: RunFolder) -> str | None:
    """Writes down the code that the run's environments have now. Returns what to say if it had
    other code before; a folder from before this was written down has nothing to compare."""
    sources = env_sources(config)
    now = {name: digest for name, (digest, _) in sources.items()}
    before = folder.read_json(ENV_SOURCES) if folder.has(ENV_SOURCES) else now
    folder.write_json(ENV_SOURCES, now)
    if now == before:
        return None
    changed = sorted(n for n in now.keys() | before.keys() if now.get(n) != before.get(n))
    files = [str(sources[name][1]) if name in sources else name for name in changed]
    return (
        f"the environments' code changed since this run was last started, in "
        f"{', '.join(files)}: earlier results are from the old code"
    )


def env_sources(config: RunConfig) -> dict[str, tuple[str, Path]]:
    """The modules that the run's environments are made of, each with a digest and its file: those
    of the classes or functions, of their bases, and what these import from the same folder."""
    sources: dict[str, tuple[str, Path]] = {}
    for section in (*config.env, *config.eval.env):
        factory = inspect.unwrap(ENVS.get(section.kind))
        parts = inspect.getmro(factory) if isinstance(factory, type) else (factory,)
        for name in dict.fromkeys(getattr(part, "__module__", "") for part in parts):
            _add(sys.modules.get(name), None, sources)
    return sources


def _add(module: Any, beside: Path | None, sources: dict[str, tuple[str, Path]]) -> None:
    """Adds a module and, over and over, what it imports from its own folder."""
    if not isinstance(module, ModuleType) or module.__name__ in sources:
        return
    file = Path(getattr(module, "__file__", None) or "")
    if file.suffix != ".py" or not file.is_file():
        return
    if file.is_relative_to(_STDLIB) and "site-packages" not in file.parts:
        return
    # A virtual environment may lie beside a user's modules, too.
    if beside is not None and not (
        file.is_relative_to(beside) and "site-packages" not in file.relative_to(beside).parts
    ):
        return
    text = file.read_bytes()
    sources[module.__name__] = (blake2b(text, digest_size=16).hexdigest(), file)
    for name in _imported(text, module.__package__ or ""):
        _add(sys.modules.get(name), file.parent, sources)


def _imported(text: bytes, package: str) -> Iterator[str]:
    """The names of all modules that a file imports, and of what else it imports from them."""
    with suppress(SyntaxError, ImportError):  # it was changed after it was imported
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                name = "." * node.level + (node.module or "")
                base = resolve_name(name, package) if node.level else name
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
