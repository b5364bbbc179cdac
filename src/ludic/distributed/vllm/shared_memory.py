"""Files of weights in shared memory: those written on this host, and those that it fetches."""

from __future__ import annotations

import errno
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.distributed import shared_folders
from ludic.distributed.interfaces import Snapshot
from ludic.distributed.patience import Away, Patience
from ludic.distributed.piece_fetcher import PieceFetcher, Source
from ludic.distributed.shared_folders import OwnedFolder, SharedFolder
from ludic.distributed.weights_file import (
    Layout,
    bytes_of,
    fill_file,
    layout_of,
    make_file,
    map_file,
)
from ludic.errors import PublishError

_WEIGHTS = "weights.safetensors"


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
    ours = folder.parent == shared_folders.shared_folder() and folder.name.startswith(
        shared_folders.PREFIX
    )
    if not ours or path.name != _WEIGHTS:
        raise ValueError(f"{path} is not a file of weights in shared memory")
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (not a dict)
            yield name, opened.get_tensor(name)
