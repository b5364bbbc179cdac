"""The checkpoints of a run. A half-written one is never taken for complete: each is written under a
temporary name and renamed when complete, and `latest` is moved last."""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from re import fullmatch
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import nn

from ludic.errors import CheckpointError, DamagedCheckpointError
from ludic.plumbing.files import file_checksum, replacing, sync, sync_tree
from ludic.sharding.world import World
from ludic.training import checkpoint_contents as contents
from ludic.training.checkpoint_contents import TrainerState as TrainerState
from ludic.training.config import CheckpointConfig
from ludic.training.update.optimizer import MasterAdamW

_log = logging.getLogger("ludic.training")
_TEMPORARY = ".writing-"


class Checkpointer:
    """Writes, finds, checks, loads and prunes the checkpoints of one run."""

    def __init__(
        self, cfg: CheckpointConfig, world: World | None = None, tokenizer: Any = None
    ) -> None:
        self.cfg, self.world, self._tokenizer = cfg, world or World(), tokenizer
        self.folder = Path(cfg.folder)
        self.last_step = -1
        self._fingerprint: str | None = None
        self._writers = self.world  # the ranks that write a checkpoint together
        if cfg.background and self.world.group is not None:
            self._writers = _own_group(self.world, self.world.group)
        self._background = BackgroundWriter(self.folder, cfg.write_timeout_s)

    def save(
        self,
        model: nn.Module,
        optimizer: MasterAdamW,
        state: TrainerState,
        then: Callable[[], object] = bool,
    ) -> None:
        """Saves everything; rank 0 calls `then` once it is complete. In the background, only
        copying the tensors is waited for; an error of the writing comes with the next call. A GPU
        without room for the copies is no reason to fail: then all of it is waited for."""
        self.finish()
        name = f"step-{state.step:08d}"
        pieces = contents.trainer_tensors(optimizer) if self.cfg.resumable else {}
        copied = self.cfg.background and contents.has_room_for(pieces.values())
        if copied:
            # Whatever training goes on to change: the tensors, and what parts gave as their state.
            pieces = {k: t.detach().clone() for k, t in pieces.items()}
            state = deepcopy(state)
        model_files = contents.save_model(model, self.world, self._tokenizer)
        fingerprint = self._fingerprint or contents.model_fingerprint(model)
        rng = contents.rng_state(self.world.device)

        def write() -> None:
            temporary = self.folder / f"{_TEMPORARY}{name}"

            def unwritable(exc: Exception) -> str:
                shutil.rmtree(temporary, ignore_errors=True)
                last = self.latest()
                earlier = f"the last good one is {last}" if last else "there is no earlier one"
                return (
                    f"could not write a checkpoint to {self.folder}: {exc}; {earlier}. Free some "
                    "space there, or move the run's folder to another disk, and resume it"
                )

            agreed = partial(self._agreed, unwritable, self._writers)
            with agreed():
                if self.world.leads:
                    shutil.rmtree(temporary, ignore_errors=True)
                    temporary.mkdir(parents=True)
                    sync(self.folder.parent)
                    model_files(temporary / "model")
            with agreed():
                contents.write_shard(temporary, pieces, rng, self.world)
            with agreed():
                if self.world.leads:
                    self._complete(temporary, name, fingerprint, state)
            if self.world.leads:
                then()

        self._background.start(write)
        if not copied:
            self.finish()
        self.last_step = state.step

    def finish(self) -> None:
        """Waits for a checkpoint that is being written, and raises what went wrong with it, or
        `CheckpointError` when it takes longer than `write_timeout_s`."""
        self._background.finish()

    @contextmanager
    def _agreed(
        self, describe: Callable[[Exception], str], world: World | None = None
    ) -> Iterator[None]:
        """Raises a `CheckpointError` on every rank where the work inside failed on any."""
        error: CheckpointError | None = None
        try:
            yield
        except CheckpointError as exc:
            error = exc
        except Exception as exc:  # safetensors and transformers have their own errors
            error = CheckpointError(describe(exc))
            error.__cause__ = exc
        (world or self.world).agree(error)

    def _complete(self, temporary: Path, name: str, fingerprint: str, state: TrainerState) -> None:
        files = {
            str(path.relative_to(temporary)): {
                "bytes": path.stat().st_size,
                "checksum": file_checksum(path),
            }
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        manifest = {
            "format": contents.FORMAT,
            "world_size": self.world.size,
            "fingerprint": fingerprint,
            "state": asdict(state),
            "tensors": contents.describe_shards(temporary, self.world.size),
            "files": files,
        }
        try:
            text = json.dumps(manifest)
        except (TypeError, ValueError) as exc:
            raise CheckpointError(f"a state_dict of the run is not JSON: {exc}") from exc
        sync_tree(temporary)  # the manifest vouches for it
        manifest_file = temporary / "manifest.json"
        manifest_file.write_text(text, encoding="utf-8")
        sync(manifest_file)
        sync(temporary)
        target = self.folder / name
        earlier = self._renamed(target, "superseded")
        os.replace(temporary, target)
        sync(self.folder)
        self._point_at(name)
        # Not before: until here, the older ones are all that is surely there.
        self._prune(name)
        if earlier is not None:
            shutil.rmtree(earlier, ignore_errors=True)

    def _prune(self, newest: str) -> None:
        for later in [p for p in self.complete() if p.name > newest]:
            self._set_aside(later, "superseded")  # `latest` was moved back: of another course
        for old in self.complete()[: -self.cfg.keep]:
            # Renamed first: a kill in the middle must not leave half of one under its name.
            doomed = self.folder / f"{_TEMPORARY}{old.name}"
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(old, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def complete(self) -> list[Path]:
        """All checkpoints by name, oldest first. Those being written have other names."""
        return sorted(p for p in self.folder.glob("step-*") if (p / "manifest.json").is_file())

    def latest(self) -> Path | None:
        """The checkpoint that `latest` names; where it names none, the newest."""
        named = self._named()
        if named is not None and (named / "manifest.json").is_file():
            return named
        complete = self.complete()
        return complete[-1] if complete else None

    def _named(self) -> Path | None:
        """What `latest` names, whether or not it is there."""
        pointer = self.folder / "latest"
        name = pointer.read_text("utf-8", "replace").strip() if pointer.is_file() else ""
        return self.folder / name if fullmatch(r"step-\d+", name) else None

    def resume(self, model: nn.Module, optimizer: MasterAdamW) -> TrainerState | None:
        """Loads the newest whole checkpoint; None where there is none at all, or `resume` is off.

        A damaged one is passed over with a warning, and kept under another name. Raises
        `CheckpointError` when none is whole.
        """
        # Now: while a later checkpoint is saved, a reference may be read with the adapter off.
        self._fingerprint = contents.model_fingerprint(model)
        if self.world.leads and (missing := contents.left_out(model)):
            _log.warning(
                "checkpoints resume this run, but their model/ lacks %d trained weights, which "
                "PEFT does not save with an adapter: %s. Name their modules in modules_to_save",
                *(len(missing), ", ".join(missing[:3])),
            )
        if self.world.leads:
            for left in self.folder.glob(f"{_TEMPORARY}*"):
                shutil.rmtree(left, ignore_errors=True)
        if not self.cfg.resume:
            self._start_over()
            return None
        whole = None
        damaged: dict[Path, DamagedCheckpointError] = {}
        with self._agreed(lambda exc: f"cannot read the checkpoints in {self.folder}: {exc}"):
            if self.world.leads:
                whole = self._newest_whole(damaged)
        name = self.world.share({"name": whole[0].name if whole else None})["name"]
        if name is None:
            return None
        path = self.folder / name
        state = contents.load_checkpoint(
            path, model, optimizer, self.world, manifest=whole[1] if whole else None
        )
        if damaged:
            self._point_at(name)
        for passed, why in damaged.items():
            now = self._set_aside(passed, "damaged")
            _log.warning("%s; %s. Resuming from step %d instead", why, now, state.step)
        self.last_step = state.step
        return state

    def _start_over(self) -> None:
        """Keeps what an earlier run left under other names: it is not part of this one."""
        with self._agreed(lambda exc: f"cannot start over in {self.folder}: {exc}"):
            if self.world.leads:
                (self.folder / "latest").unlink(missing_ok=True)
                for earlier in sorted(p for p in self.folder.glob("step-*") if p.is_dir()):
                    now = self._set_aside(earlier, "superseded")
                    _log.warning("resume is off and %s is of an earlier run: %s", earlier, now)

    def _newest_whole(
        self, damaged: dict[Path, DamagedCheckpointError]
    ) -> tuple[Path, dict[str, Any]] | None:
        """What `latest` names, or else the newest that is whole, with its manifest. What is wrong
        with those before it goes into `damaged`."""
        named = self._named()
        folders = sorted((p for p in self.folder.glob("step-*") if p.is_dir()), reverse=True)
        for path in dict.fromkeys([named, *folders] if named else folders):
            try:
                return path, contents.verify_checkpoint(path)
            except DamagedCheckpointError as exc:
                damaged[path] = exc
        if damaged:
            reasons = "; ".join(map(str, damaged.values()))
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole: {reasons}. Put the "
                "files back from a copy, or train from the start in another folder"
            )
        return None

    def _set_aside(self, path: Path, why: str) -> str:
        """Renames a checkpoint, and returns a sentence that says so."""
        renamed = self._renamed(path, why)
        return f"it is kept as {renamed.name}" if renamed else "nothing is left of it"

    def _renamed(self, path: Path, why: str) -> Path | None:
        """Renames a checkpoint, so that no later one of its step takes its place; None where there
        is none."""
        if not path.exists():
            return None
        target = path.with_name(f"{why}-{path.name}")
        number = 2
        while target.exists():
            target, number = path.with_name(f"{why}-{path.name}-{number}"), number + 1
        try:
            os.replace(path, target)
        except OSError as exc:
            raise CheckpointError(f"cannot rename the {why} {path} to {target}: {exc}") from exc
        return target

    def _point_at(self, name: str) -> None:
        with replacing(self.folder / "latest", durable=True) as temporary:
            temporary.write_text(name, encoding="utf-8")


def _own_group(world: World, group: dist.ProcessGroup) -> World:
    """The same ranks under a process group of the writers' own: in the background, their
    collectives must not come between those of the training."""
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return World(world.rank, world.size, own)


class BackgroundWriter:
    """Runs one write at a time in a thread.

    The thread is a daemon, so a disk that hangs cannot keep the process from ending; a write that
    is still running at exit is waited for, up to the deadline. `start` and `finish` are called
    from one thread at a time, and the write touches nothing of this object but its future.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder, self.timeout_s = folder, timeout_s
        self._writing: Future[None] | None = None
        self._hung: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Starts `write`. Raises `CheckpointError` while one that missed its deadline runs."""
        self.finish()
        if self._hung is not None and not self._hung.done():
            raise self._error()
        writing = self._writing = Future()

        def work() -> None:
            try:
                write()
            except BaseException as exc:
                writing.set_exception(exc)
            else:
                writing.set_result(None)

        Thread(target=work, name="ludic-checkpoint", daemon=True).start()
        atexit.register(self.finish)

    def finish(self) -> None:
        """Waits for the write that is running, and raises what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        atexit.unregister(self.finish)
        try:
            failure = writing.exception(self.timeout_s)
        except TimeoutError:
            self._hung = writing
            raise self._error() from None
        if failure is not None:
            raise failure

    def _error(self) -> CheckpointError:
        return CheckpointError(
            f"waited {self.timeout_s:.3g} s for a checkpoint to be written to {self.folder}, and "
            "the disk has not answered: check it, or move the run's folder to a faster one. "
            "Earlier checkpoints are complete, and the run can be resumed from them"
        )
