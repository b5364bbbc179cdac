"""The folder of a host for the policies of a run, which all of its actors share."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from ludic.errors import ConfigError
from ludic.pipeline.store import PipelineConfig

CACHES = "ludic-policies-"
"""How the names of such folders begin."""
_USERS = "users.lock"
_LEFT_S = 3600.0
_LOCK_TRIES = 10


def cache_folder(config: PipelineConfig) -> Path:
    """Returns the folder for a run's policies on this host: in memory where there is room for
    shared memory, and this user's alone."""
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    name = blake2b(f"{config.url} {config.run}".encode(), digest_size=8).hexdigest()
    return base / f"{CACHES}{os.getuid()}-{name}"


class PolicyCache:
    """The newest `keep` files of such a folder. Its processes hold a shared lock on it: the last
    one removes it, and the next run those of processes that were killed."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep
        self._user: int | None = None

    def open(self) -> None:
        """Makes the folder, and holds it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_uid != os.getuid():
            raise ConfigError(f"{self.path} belongs to another user: have it removed")
        if self._user is None:
            _remove_abandoned(self.path)
            self._user = self._lock()

    def close(self) -> None:
        """Lets go of the folder; the host's last process removes it."""
        if self._user is not None:
            with suppress(OSError):  # others use it
                fcntl.flock(self._user, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._user)
            self._user = None

    def tidy(self) -> None:
        """Removes all but the newest files, and what a fetch that failed has left."""
        files = dict[Path, float]()
        for file in self.path.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # other processes tidy, too
                files[file] = file.stat().st_mtime
        for old in sorted(files, key=lambda file: files[file])[: -self.keep]:
            old.unlink(missing_ok=True)
            old.with_suffix(".lock").unlink(missing_ok=True)
        for part in self.path.glob("*.part"):
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _LEFT_S:
                    part.unlink()

    def _lock(self) -> int | None:
        """A shared lock on the folder; None where somebody removes it now, and the next fetch makes
        it. It may be removed between opening its file and locking that: then it is made again."""
        path = self.path / _USERS
        for _ in range(_LOCK_TRIES):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                user = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(user, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    if os.path.samestat(os.fstat(user), path.stat()):
                        return user
                except BlockingIOError:
                    os.close(user)
                    return None
                except BaseException:
                    os.close(user)
                    raise
                os.close(user)
        return None


def _remove_abandoned(own: Path) -> None:
    """Removes the caches of other runs whose processes were all killed: nobody locks them."""
    if not own.name.startswith(CACHES):
        return
    for folder in own.parent.glob(f"{CACHES}{os.getuid()}-*"):
        if folder == own:
            continue
        with suppress(OSError):  # somebody uses it, or removes it now
            user = os.open(folder / _USERS, os.O_RDWR)
            try:
                fcntl.flock(user, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(user)
