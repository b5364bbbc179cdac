"""Folders in shared memory that servers and actors on this machine read, and that clean up after
themselves.

An owner keeps its folder's file `lock` locked. The lock ends with its process, however that ends,
so a folder with a free lock was left behind; whoever creates the next folder removes it. Locks
work in every container that sees the folder; the number in its name is only for people.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ludic.errors import DeadlineError, PublishError

PREFIX = "ludic-publish-"
_LOCK = "lock"
_POLL_S = 0.02


def shared_folder() -> Path:
    """Where such folders are put: memory where the system has a folder for it."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


class OwnedFolder:
    """A new folder under `parent` (default: shared memory), private to the user. It is removed at
    the end of this object, or of the process."""

    def __init__(self, parent: str | Path | None = None) -> None:
        self.parent = shared_folder() if parent is None else Path(parent)
        _remove_abandoned(self.parent)
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        draft = self.parent / f".{name}"
        draft.mkdir(mode=0o700)
        lock = os.open(draft / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under this name others look whether it is abandoned: not before it is locked.
        self.path = draft.rename(self.parent / name)
        self._end = weakref.finalize(self, _let_go, self.path, lock, os.getpid())

    def close(self) -> None:
        """Removes the folder and what is in it."""
        self._end()


class SharedFolder:
    """A folder in shared memory that any number of this user's processes hold under one `name`, or
    one elsewhere, by its path. It is removed when the last of them lets go; one that is killed
    counts as having done so. With `inherit`, what such left under this very name stays."""

    def __init__(self, name: str | Path, *, inherit: bool = False) -> None:
        self.path = name if isinstance(name, Path) else shared_folder() / f"{PREFIX}{name}"
        _remove_abandoned(self.path.parent, but=self.path if inherit else None)
        lock = None
        for _ in range(100):  # others may make or remove it at the same time
            lock = _made_and_held(self.path) or _held(self.path)
            if lock is not None:
                break
            time.sleep(0.01)
        if lock is None:
            raise PublishError(f"{self.path} cannot be held: is it another user's?")
        self._end = weakref.finalize(self, _let_go, self.path, lock, os.getpid())

    def close(self) -> None:
        """Lets go."""
        self._end()

    @contextmanager
    def alone(self, timeout_s: float) -> Iterator[None]:
        """One holder at a time: a lock ends with its process, however that ends."""
        began = time.monotonic()
        with (self.path / "writing").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() - began > timeout_s:
                        what = "another process to finish the copy of the weights"
                        raise DeadlineError(what, str(self.path), timeout_s) from None
                    time.sleep(_POLL_S)
            yield


def _made_and_held(path: Path) -> int | None:
    """The lock of a folder that was not there; None: it was. As with `OwnedFolder`, it has its name
    only when it is locked."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    draft.mkdir(mode=0o700)
    lock = os.open(draft / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        draft.rename(path)
    except OSError:
        os.close(lock)
        shutil.rmtree(draft, ignore_errors=True)
        return None
    return lock


def _held(path: Path) -> int | None:
    """The lock of a folder that is there, and ours; None: it goes away."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(lock), (path / _LOCK).stat())
        if same and path.stat().st_uid == os.getuid():
            return lock
    os.close(lock)
    return None


def _remove_abandoned(parent: Path, but: Path | None = None) -> None:
    """Removes the folders that nobody keeps, each under its lock: nobody can take it meanwhile."""
    for path in parent.glob(f"{PREFIX}*"):
        if path == but:
            continue
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except FileNotFoundError:  # a remover was killed at its very end, or is there now
            with suppress(OSError):
                path.rmdir()
            continue
        except OSError:  # another user's
            continue
        _remove_unless_held(path, lock)


def _remove_unless_held(path: Path, lock: int) -> None:
    """Removes the folder if nobody but us has its lock, which is closed."""
    with suppress(OSError):  # others hold it, or it is gone
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), (path / _LOCK).stat()):  # else it is another's
            _remove_folder(path)
    os.close(lock)


def _remove_folder(path: Path) -> None:
    """Removes a folder whose lock the caller has. The lock goes last: a folder without one is
    empty, and one that another process then makes in its place is not removed with it."""
    with suppress(OSError):  # then the next who sweeps tries again
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _LOCK:
                entry.unlink(missing_ok=True)
        (path / _LOCK).unlink()
        path.rmdir()


def is_abandoned(path: Path) -> bool:
    """Whether nobody keeps the folder `path`, or it is gone."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:  # another user's: not ours to judge
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _let_go(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # else a fork of a holder ends
        _remove_unless_held(path, lock)
