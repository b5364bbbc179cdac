"""Fetches policies into a cache that a host's actors share, and passes them on to other hosts."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from ludic.distributed.weights_http import (
    CLAIMED,
    HAS,
    MISSING,
    PieceFile,
    PolicyServer,
    SourceError,
    get,
    is_loopback,
    listening_address,
    read_manifest,
)
from ludic.errors import ConfigError, PipelineError, PublishError
from ludic.pipeline.policies import StoredPolicy, file_in_kernel
from ludic.pipeline.policy_cache import PolicyCache, cache_folder
from ludic.pipeline.store import Store
from ludic.pipeline.weights_difference import make_from_difference
from ludic.plumbing.files import PIECE, file_checksum, piece_digests

_log = logging.getLogger("ludic.pipeline")
_POLL_S = 0.1
_REDIS_S = 1.0
_CLAIM_MS = 15_000
_ASK_FOR = 64
_WRONG = 3
_AGAIN_S = 1.0


class NotComingError(PublishError):
    """No source has sent anything for as long as was waited; a later try may do better."""


@dataclass(frozen=True, slots=True)
class Patience:
    """A fetch fails when no piece has come for `deadline_s`. A source is left when it sends nothing
    for `silence_s`; a host that passes on, also when a piece takes longer than `piece_s`."""

    deadline_s: float = 120.0
    silence_s: float = 10.0
    piece_s: float = 30.0


@dataclass(slots=True)
class _Fetch:
    """A policy on its way here. Two threads work on it: one asks the trainer, the other the hosts
    that have pieces already. The file and its digits change under `lock`, and not when it is over;
    the rest is set and read as it is."""

    policy: StoredPolicy
    file: PieceFile
    lock: threading.Lock = field(default_factory=threading.Lock)
    sharing: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    left_out: set[str] = field(default_factory=set)
    alone: bool = False  # Redis does not answer
    wrong: int = 0
    problem: str = "no source has answered"
    failure: PublishError | None = None
    gone: bool = False

    def mark(self, piece: int, digit: int, data: bytes = b"") -> None:
        """Notes what has become of a piece, and writes it if it has come."""
        with self.lock:
            if self.over.is_set() or self.file.digits[piece] == HAS:
                return
            if digit == HAS:
                os.pwrite(self.file.handle, data, piece * PIECE)
            self.file.digits[piece] = digit
            if all(known == HAS for known in self.file.digits):
                self.over.set()

    def fail(self, why: str, kind: type[PublishError] = PublishError) -> None:
        self.failure = kind(
            f"cannot fetch policy {self.policy.version} from {self.policy.url}: {why}"
        )
        self.over.set()


class PolicyFetcher:
    """Brings announced policies to this host, once for all of its processes.

    `folder` is the cache that they share; the newest `keep` files stay. What is here is passed on
    to other hosts from `address` (as `pipeline.policy_address`), unless that is a loopback address
    and the trainer is elsewhere. `progressed` is when something last came.
    """

    def __init__(
        self,
        store: Store,
        folder: Path | None = None,
        *,
        address: str = "127.0.0.1",
        keep: int = 2,
        patience: Patience | None = None,
    ) -> None:
        self.store, self.cache = store, PolicyCache(folder or cache_folder(store.config), keep)
        self.patience = patience or Patience()
        self.progressed = time.monotonic()
        self.server: PolicyServer | None = None
        self._address: str | None = address
        self._closed = threading.Event()
        self._job: _Fetch | None = None

    def close(self) -> None:
        """Ends a fetch that is under way. The host's last process removes the cache."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self.server is not None:
            with suppress(PipelineError):  # a Redis that is gone names nobody either
                self.store.run("share", "", self.server.url, "", 0, "", patience_s=_REDIS_S)
            self.server.close()
        self.cache.close()

    def fetch(self, policy: StoredPolicy) -> StoredPolicy:
        """Returns the policy with a path that this host can open. Where a newer one has taken its
        place at the trainer, it comes back as it was, and its path leads nowhere.

        Raises `PublishError`, which names the version and the source, when it does not come.
        """
        try:
            return _found(policy) or self._fetch(policy)
        except NotComingError:
            self._closed.wait(_AGAIN_S)  # whoever tries again does not do so at once
            raise
        except OSError as exc:
            self._closed.wait(_AGAIN_S)
            where = f"from {policy.url} into {self.cache.path}"
            raise NotComingError(f"cannot fetch policy {policy.version} {where}: {exc}") from exc

    def _fetch(self, policy: StoredPolicy) -> StoredPolicy:
        self.cache.open()
        target = self.cache.path / f"{policy.checksum}.safetensors"
        here = replace(policy, path=str(target))
        part = target.with_suffix(".part")
        with self._alone(target, policy.version):
            if target.is_file() or make_from_difference(policy, target, self.fetch):
                self.cache.tidy()
                return here
            self.progressed = time.monotonic()
            self._listen(policy.url, policy.key)
            job = self._job = _Fetch(policy, PieceFile(-1, 0))
            try:
                self._fetch_into(part, job)
            except OSError as exc:
                job.fail(f"{part}: {exc}", NotComingError)
            if job.failure is not None:
                raise job.failure
            if job.gone:
                part.unlink(missing_ok=True)
                # Another file may be at its path here: then it has the one that did not come.
                return here if os.path.exists(policy.path) else policy
            os.replace(part, target)
            self.cache.tidy()
            return here

    def announced(self, serial: int) -> None:
        """There is a newer policy: the one that is fetched is given up, unless it gets on."""
        job = self._job
        stuck = time.monotonic() - self.progressed > self.patience.silence_s
        if job is not None and job.policy.serial < serial and stuck and not job.over.is_set():
            job.fail(f"a newer one is announced; {job.problem}", NotComingError)

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
                        self.progressed = began
                waited = time.monotonic() - began
                if waited > self.patience.deadline_s + self.patience.silence_s:
                    raise NotComingError(
                        f"waited {waited:.3g} s for policy {version}, which another process of "
                        f"this host fetches into {self.cache.path}"
                    )
                if self._closed.wait(_POLL_S):
                    raise NotComingError(f"policy {version} is not waited for: this process ends")
            yield
        finally:
            os.close(lock)

    def _listen(self, url: str, key: str) -> None:
        if self._address is not None and self.server is None:
            try:
                host, port = listening_address(self._address, self.store.config.url)
                if is_loopback(url) or not is_loopback(host):
                    self.server = PolicyServer(key, host, port)
            except ConfigError as exc:
                _log.warning("this host does not pass policies on: %s", exc)
            self._address = None
        if self.server is not None:
            self.server.key = key

    def _fetch_into(self, part: Path, job: _Fetch) -> None:
        manifest = self._manifest(job)
        if manifest is None:
            return
        size, digests = manifest
        handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            digits = bytearray([MISSING]) * len(digests)
            if os.fstat(handle).st_size == size:  # left by a process that was killed
                here = zip(piece_digests(handle), digests, strict=True)
                digits = bytearray(HAS if a == b else MISSING for a, b in here)
            os.ftruncate(handle, size)
            job.file = PieceFile(handle, size, digests, digits)
            if self.server is not None:
                served = PieceFile(os.dup(handle), size, digests, digits)
                self.server.put(job.policy.checksum, served)
            if MISSING not in digits:
                return
            threading.Thread(target=self._work, args=(job, True), daemon=True).start()
            self._work(job, False)
            self._share(job, [])
        finally:
            job.over.set()
            with job.lock:  # a thread that comes too late writes nothing
                os.close(handle)

    def _manifest(self, job: _Fetch) -> tuple[int, list[bytes]] | None:
        """The size and the pieces' checksums, from whoever has them; None if the job is over."""
        began = time.monotonic()
        while not job.over.is_set():
            _, others = self._share(job, [])
            for url in [*random.sample([url for url, _ in others], len(others)), job.policy.url]:
                try:
                    until = time.monotonic() + self.patience.piece_s
                    data = get(
                        *(url, f"/{job.policy.checksum}/pieces", job.policy.key, None),
                        silence_s=self.patience.silence_s,
                        until=until,
                        given_up=self._closed.is_set,
                    )
                    return read_manifest(data, job.policy.checksum, url)
                except SourceError as exc:
                    self._leave(job, url, exc)
            self._wait(job, began)
        return None

    def _wait(self, job: _Fetch, latest: float) -> None:
        waited = time.monotonic() - latest
        if self._closed.is_set():
            job.fail("this process ends", NotComingError)
        elif waited > self.patience.deadline_s:
            hint = ""
            if is_loopback(job.policy.url):
                hint = (
                    " (that is a loopback address: for actors on other machines, set the trainer's "
                    "pipeline.policy_address)"
                )
            job.fail(f"nothing came for {waited:.3g} s; {job.problem}{hint}", NotComingError)
        else:
            job.over.wait(_POLL_S)

    def _work(self, job: _Fetch, from_hosts: bool) -> None:
        """Fetches pieces until all are here: those that nobody has from the trainer, or those that
        other hosts have from them."""
        try:
            while not job.over.is_set():
                missing = [i for i, digit in enumerate(job.file.digits) if digit == MISSING]
                random.shuffle(missing)
                claimed, others = self._share(job, [] if from_hosts else missing[:_ASK_FOR])
                if from_hosts and job.alone:
                    return
                choices = [
                    (piece, url)
                    for url, digits in others
                    for piece in missing
                    if digits[piece : piece + 1] == bytes([HAS])
                ]
                if from_hosts and choices:
                    piece, url = random.choice(choices)
                    job.mark(piece, CLAIMED)
                    self._take(job, piece, url, self.patience.piece_s)
                elif claimed >= 0:
                    self._take(job, claimed, job.policy.url, self.patience.deadline_s)
                else:
                    self._wait(job, self.progressed)
        except Exception as exc:  # the other thread must hear of it, whatever it is
            kind = NotComingError if isinstance(exc, OSError) else PublishError
            job.fail(f"{type(exc).__name__}: {exc}", kind)

    def _take(self, job: _Fetch, piece: int, url: str, seconds: float) -> None:
        file, start = job.file, piece * PIECE
        try:
            data = get(
                *(url, f"/{job.policy.checksum}", job.policy.key),
                *(min(PIECE, file.size - start), start),
                silence_s=self.patience.silence_s,
                until=time.monotonic() + seconds,
                given_up=lambda: job.over.is_set() or self._closed.is_set(),
            )
            if sha256(data).digest() != file.digests[piece]:
                job.wrong += url == job.policy.url
                raise SourceError(url, f"piece {piece} has a wrong checksum")
        except SourceError as exc:
            job.mark(piece, MISSING)
            self._leave(job, url, exc)
            if not job.over.is_set():
                self._wait(job, self.progressed)
            return
        self.progressed = time.monotonic()
        job.mark(piece, HAS, data)

    def _leave(self, job: _Fetch, url: str, why: SourceError) -> None:
        """Asks a host no more for this policy; the trainer is asked again, unless it is no use."""
        if job.over.is_set():
            return
        if url != job.policy.url:
            job.left_out.add(url)
            _log.warning("policy %d is not taken from %s", job.policy.version, why)
        elif why.status == 401:
            # Perhaps a new trainer at the same address: the newest policy has its key.
            refused = "it refuses the run's key: is it the trainer of this run?"
            job.fail(refused, NotComingError)
        elif why.status == 404:
            job.gone = True
            job.over.set()
        elif job.wrong >= _WRONG:
            job.fail(f"{why}, {_WRONG} times")
        job.problem = str(why)

    def _share(self, job: _Fetch, wanted: Sequence[int]) -> tuple[int, list[tuple[str, bytes]]]:
        """Says what is here; returns the piece to ask the trainer for (or -1), and what others
        have. Where Redis does not answer, this host fetches for itself."""
        address = "" if self.server is None else self.server.url
        claimed, rows = (wanted[0] if wanted else -1), []
        with job.sharing:  # so that the other thread does not take a claim back
            try:
                if not job.alone:
                    claimed, rows = self.store.run(
                        *("share", job.policy.checksum, address, bytes(job.file.digits)),
                        *(_CLAIM_MS, " ".join(job.left_out), *wanted),
                        patience_s=_REDIS_S,
                    )
            except PipelineError as exc:
                _log.debug("pieces are not shared: %s", exc)
                job.alone = True
            if claimed >= 0:
                job.mark(claimed, CLAIMED)
        return claimed, [(url.decode(), digits) for url, digits in rows]


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
