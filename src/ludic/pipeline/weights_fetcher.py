"""Fetches policies into a cache that a host's actors share, and passes them on to other hosts."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from ludic.distributed.patience import Patience
from ludic.distributed.piece_fetcher import NotComingError, PieceFetcher, Source
from ludic.distributed.shared_folders import SharedFolder
from ludic.pipeline.policies import StoredPolicy, file_in_kernel
from ludic.pipeline.store import PipelineConfig
from ludic.pipeline.weights_difference import make_from_difference
from ludic.plumbing.files import file_checksum

_POLL_S = 0.1
_AGAIN_S = 1.0
_LEFT_S = 3600.0


class PolicyFetcher:
    """Brings announced policies to this host, once for all of its processes.

    `folder` is the cache that they share; the newest `keep` files stay. What is here is passed on
    to other hosts from `address` (as `pipeline.policy_address`): see `PieceFetcher`.
    """

    def __init__(
        self,
        config: PipelineConfig,
        folder: Path | None = None,
        *,
        address: str = "127.0.0.1",
        keep: int = 2,
        patience: Patience | None = None,
    ) -> None:
        run = blake2b(f"{config.url} {config.run}".encode(), digest_size=8).hexdigest()
        self._cache_name = folder or f"policies-{os.getuid()}-{run}"
        self._keep = keep
        self._cache: SharedFolder | None = None
        self.pieces = PieceFetcher(patience, address, towards=config.url)
        self._serial: int | None = None

    def close(self) -> None:
        """Ends a fetch that is under way. The host's last process removes the cache."""
        if not self.pieces.closed.is_set():
            self.pieces.closed.set()
            self.pieces.leave()
            self.pieces.close()
            if self._cache is not None:
                self._cache.close()

    def fetch(self, policy: StoredPolicy) -> StoredPolicy:
        """Returns the policy with a path that this host can open. Where a newer one has taken its
        place at the trainer, it comes back as it was, and its path leads nowhere.

        Raises `PublishError`, which names the version and the source, when it does not come.
        """
        try:
            return _found(policy) or self._fetch(policy)
        except NotComingError:
            self.pieces.closed.wait(_AGAIN_S)  # whoever tries again does not do so at once
            raise
        except OSError as exc:
            self.pieces.closed.wait(_AGAIN_S)
            self._cache = None  # it may have been removed: the next try makes it
            where = f"from {policy.url} into {self._cache_name}"
            raise NotComingError(f"cannot fetch policy {policy.version} {where}: {exc}") from exc

    def _fetch(self, policy: StoredPolicy) -> StoredPolicy:
        if self._cache is None:
            self._cache = SharedFolder(self._cache_name, inherit=True)
        target = self._cache.path / f"{policy.checksum}.safetensors"
        here = replace(policy, path=str(target))
        part = target.with_suffix(".part")
        with self._alone(target, policy.version):
            if target.is_file() or make_from_difference(policy, target, self.fetch):
                _tidy(target.parent, self._keep)
                return here
            self._serial = policy.serial
            what = f"policy {policy.version}"
            source = Source(policy.url, policy.key, policy.checksum, what)
            if not self.pieces.fetch(source, part):
                # Another file may be at its path here: then it has the one that did not come.
                return here if os.path.exists(policy.path) else policy
            os.replace(part, target)
            _tidy(target.parent, self._keep)
            return here

    def announced(self, serial: int) -> None:
        """There is a newer policy: the one that is fetched is given up, unless it gets on."""
        if self._serial is not None and self._serial < serial:
            self.pieces.give_up("a newer one is announced")

    @contextmanager
    def _alone(self, target: Path, version: int) -> Iterator[None]:
        """One process of the host fetches a policy; the others wait while it gets on."""
        lock = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        began, changed = time.monotonic(), 0
        try:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                with suppress(FileNotFoundError):
                    if (now := target.with_suffix(".part").stat().st_mtime_ns) != changed:
                        changed, began = now, time.monotonic()
                        self.pieces.progressed = began
                waited = time.monotonic() - began
                patience = self.pieces.patience
                if waited > patience.deadline_s + patience.silence_s:
                    raise NotComingError(
                        f"waited {waited:.3g} s for policy {version}, which another process of "
                        f"this host fetches into {target.parent}"
                    )
                if self.pieces.closed.wait(_POLL_S):
                    raise NotComingError(f"policy {version} is not waited for: this process ends")
            yield
        finally:
            os.close(lock)


def _found(policy: StoredPolicy) -> StoredPolicy | None:
    """The policy, if the trainer's path leads to it on this host and not to another file of that
    name, or to none. It then says which file that is here: who loads it need not read it twice."""
    path = Path(policy.path)
    with suppress(OSError):  # it has just been removed, or is not ours to read
        if path.is_file():
            file = file_in_kernel(path)
            if file == policy.file or (policy.checksum and file_checksum(path) == policy.checksum):
                return replace(policy, file=file)
    return None


def _tidy(cache: Path, keep: int) -> None:
    """Removes all but the newest files, and what a fetch that failed has left."""
    files = dict[Path, float]()
    for file in cache.glob("*.safetensors"):
        with suppress(FileNotFoundError):  # other processes tidy, too
            files[file] = file.stat().st_mtime
    for old in sorted(files, key=lambda file: files[file])[:-keep]:
        old.unlink(missing_ok=True)
        old.with_suffix(".lock").unlink(missing_ok=True)
    for part in cache.glob("*.part"):
        with suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > _LEFT_S:
                part.unlink()
