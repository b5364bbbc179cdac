"""Folders in shared memory that servers and actors on this machine read, and that nobody has to
clean up.

An owner keeps its folder's file `lock` locked. A lock ends with its process, however that ends:
a folder whose lock is free was left behind, and is removed by the next who makes one. The kernel
knows of it in every container that sees the folder; the number in its name is for people.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.distributed.interfaces import Snapshot
from ludic.distributed.patience import Away, Patience
from ludic.distributed.piece_fetcher import PieceFetcher, Source
from ludic.distributed.weights_file import (
    Layout,
    bytes_of,
    fill_file,
    layout_of,
    make_file,
    map_file,
)
from ludic.errors import DeadlineError, PublishError

_PREFIX = "ludic-publish-"
_LOCK = "lock"
_WEIGHTS = "weights.safetensors"
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
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        made = self.parent / f".{name}"
        made.mkdir(mode=0o700)
        lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under this name others look whether it is abandoned: not before it is locked.
        self.path = made.rename(self.parent / name)
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Removes the folder and what is in it."""
        self._end()


class SharedFolder:
    """A folder in shared memory that any number of this user's processes hold under one `name`. It
    is removed when the last of them lets go; one that is killed counts as having done so."""

    def __init__(self, name: str) -> None:
        self.path = shared_folder() / f"{_PREFIX}{name}"
        _remove_abandoned(self.path.parent)
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
    made = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    made.mkdir(mode=0o700)
    lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        made.rename(path)
    except OSError:
        os.close(lock)
        shutil.rmtree(made, ignore_errors=True)
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


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders that nobody keeps, each under its lock: nobody can take it meanwhile."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except FileNotFoundError:  # a remover was killed at its very end, or is there now
            with suppress(OSError):
                path.rmdir()
            continue
        except OSError:  # another user's
            continue
        with suppress(OSError):  # it is kept, or gone
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), (path / _LOCK).stat()):
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


class SharedWeights(Snapshot):
    """Tensors in a file in shared memory, for one publish: the file is removed when nobody has this
    any more, unless a host took it as its copy, which later differences change."""

    def __init__(self, path: Path, folder: OwnedFolder) -> None:
        super().__init__(map_file(path))
        self.path, self.folder = path, folder


def make_shared(layout: Layout) -> SharedWeights:
    """A new file for such tensors, all zero."""
    folder = OwnedFolder()
    with _removing(folder), _saying_what_is_free(folder.parent, layout):
        if bytes_of(layout) > shutil.disk_usage(folder.parent).free:
            raise OSError(errno.ENOSPC, "No space left")
        path = folder.path / _WEIGHTS
        make_file(path, layout)
        return SharedWeights(path, folder)


def fill_shared(path: Path, layout: Layout, parts: Iterable[tuple[str, Tensor, int]]) -> None:
    """Writes rows into a file that `make_shared` made: see `fill_file`."""
    with _saying_what_is_free(path.parent.parent, layout):
        fill_file(path, parts)


def write_shared(weights: Mapping[str, Tensor]) -> tuple[Path, OwnedFolder]:
    """Writes the tensors to a file in a new folder, which the caller closes."""
    layout = layout_of(weights)
    shared = make_shared(layout)
    with _removing(shared.folder):
        fill_shared(shared.path, layout, ((name, tensor, 0) for name, tensor in weights.items()))
    return shared.path, shared.folder


class FetchedWeights:
    """Files of weights that this host fetches by HTTP, each once for all workers of all servers on
    it that have it at the same time. The worker that fetched one passes it on to other hosts where
    `pass_on` says so: an address of this machine, as `pipeline.policy_address` (None: it does not).

    Threads may call it: the newest fetch is `_current`, which changes under the lock; one whose
    time is over ends by itself, and touches nothing but its own.
    """

    def __init__(self, pass_on: str | None = None) -> None:
        self._pass_on, self._away = pass_on, Away()
        self._lock = threading.Lock()
        self._current: _Fetched | None = None

    def fetch(self, source: Mapping[str, Any]) -> Path:
        """Returns the file of which an `HTTPPlane` says so; it is there until `drop`, or until
        another is fetched."""
        return self.begin(source).result()  # which has its own deadlines

    def begin(self, source: Mapping[str, Any]) -> Future[Path]:
        """The same, in a thread; a fetch of the same file is gone on with, any other ends."""
        with self._lock:
            before = self._current
            if before is not None and before.source == source:
                return before.path
            fetched = self._current = _Fetched(source, self._pass_on, self._away)
        ending = None if before is None else before.close()
        threading.Thread(target=fetched.work, args=(ending,), daemon=True).start()
        return fetched.path

    def drop(self) -> None:
        """Lets go of the file, and passes it on no longer: who has mapped it may go on reading. A
        fetch that is under way ends."""
        with self._lock:
            before, self._current = self._current, None
        if before is not None:
            before.close()


class _Fetched:
    """One such file: `work` brings it here."""

    def __init__(self, source: Mapping[str, Any], pass_on: str | None, away: Away) -> None:
        self.source, self.path = source, Future[Path]()
        self._url, key, checksum = (str(source[name]) for name in ("url", "key", "checksum"))
        self._timeout_s = float(source["timeout_s"])
        if not re.fullmatch("[0-9a-f]{64}", checksum):
            raise ValueError(f"{checksum!r} is not the checksum of a file of weights")
        self._file = Source(self._url, key, checksum)
        # A run's own: another's copy of the same file may be changed in place by a difference.
        run = sha256(key.encode()).hexdigest()[:16]
        self._folder = SharedFolder(f"fetched-{checksum}-{run}")
        self._pieces = PieceFetcher(Patience.within(self._timeout_s), pass_on, away=away)

    def work(self, ending: threading.Thread | None) -> None:
        if ending is not None:  # it may listen where this one is to
            ending.join(10.0)
        path = self._folder.path / _WEIGHTS
        try:
            with self._folder.alone(self._timeout_s):
                if not path.exists():
                    part = path.with_suffix(".part")
                    if not self._pieces.fetch(self._file, part):
                        raise PublishError(f"{self._url} does not offer these weights any more")
                    part.rename(path)
            self.path.set_result(path)
        except BaseException as exc:
            self.close()
            self.path.set_exception(exc)

    def close(self) -> threading.Thread:
        """Returns the thread that ends it: that takes a moment, and sampling may stand still."""
        self._pieces.closed.set()
        ending = threading.Thread(target=self._pieces.close, name="ludic-policies-end", daemon=True)
        ending.start()
        self._folder.close()
        return ending


@contextmanager
def _removing(folder: OwnedFolder) -> Iterator[None]:
    """Removes the folder where its body raises."""
    try:
        yield
    except BaseException:
        folder.close()
        raise


@contextmanager
def _saying_what_is_free(parent: Path, layout: Layout) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(parent).free
        raise PublishError(
            f"the weights need {bytes_of(layout) / 2**20:,.1f} MiB in {parent}, and "
            f"{free / 2**20:,.1f} MiB are free there: give it more (Docker: --shm-size, or "
            "--ipc=host), or publish over another plane (ipc for weights on the servers' GPU, "
            "nccl for those on others)"
        ) from exc


def open_shared(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of such a file, mapped and not copied. No other file is opened."""
    folder = path.parent
    ours = folder.parent == shared_folder() and folder.name.startswith(_PREFIX)
    if not ours or path.name != _WEIGHTS:
        raise ValueError(f"{path} is not a file of weights in shared memory")
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (not a dict)
            yield name, opened.get_tensor(name)


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # else a fork of the owner ends
        _remove_folder(path)
        os.close(lock)


def _let_go(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # else a fork of a holder ends
        with suppress(OSError):  # others hold it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_folder(path)
        os.close(lock)
