"""Weights by HTTP: the side that fetches, and passes on what it has.

A host fetches a file once, in pieces, and checks each. It takes a piece from another host that has
it, and from the trainer only if no host does. A host that is dead, slow or wrong is not asked again
for that file; the trainer is asked instead. `Patience` says what that costs, and `Away` which hosts
are left out of later files too.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from ludic.distributed.addresses import is_loopback, listening_address
from ludic.distributed.patience import Away, Patience
from ludic.distributed.weights_http import (
    CLAIM_S,
    CLAIMED,
    HAS,
    MISSING,
    PieceFile,
    PolicyServer,
    SourceError,
    get,
    read_manifest,
)
from ludic.errors import ConfigError, PublishError
from ludic.plumbing.files import PIECE, piece_digests

_log = logging.getLogger("ludic.distributed")
_POLL_S, _LOOK_S = 0.1, 1.0
_ASK_FOR = 64
_WRONG = 3
_TRAINER_PIECE_S = 120.0
_LEAVE_S = 1.0


class NotComingError(PublishError):
    """No source has sent anything for as long as was waited; a later try may do better."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that a trainer serves. `what` is its name in messages."""

    url: str
    key: str = field(repr=False)
    checksum: str
    what: str = "the weights"


@dataclass(slots=True)
class _Fetch:
    """A file on its way here. Two threads work on it, and ask the trainer and the hosts that have
    pieces already, each for one at a time (`asked`: since when); who waits for it looks whether it
    is still wanted. The file and its digits change under `lock`, and not when it is over; whom to
    ask is chosen under `sharing`; the rest is set and read as it is."""

    source: Source
    until: float
    file: PieceFile = field(default_factory=lambda: PieceFile(-1, 0))
    lock: threading.Lock = field(default_factory=threading.Lock)
    sharing: threading.RLock = field(default_factory=threading.RLock)
    over: threading.Event = field(default_factory=threading.Event)
    left_out: set[str] = field(default_factory=set)
    asked: dict[str, float] = field(default_factory=dict)
    wrong: int = 0
    """How often the trainer sent wrong bytes, or a piece took too long."""
    failed: bool = False
    """Whether the trainer has failed to answer."""
    problem: str = "no source has answered"
    failure: PublishError | None = None
    gone: bool = False

    def mark(self, piece: int, digit: int, data: bytes = b"") -> None:
        """Notes what has become of a piece, and writes it if it has come."""
        with self.lock:
            if self.over.is_set() or self.file.digits[piece] == HAS:
                return
            if digit == HAS:
                written = os.pwrite(self.file.handle, data, piece * PIECE)
                if written != len(data):  # as in shared memory that is full
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.file.digits[piece] = digit
            if all(d == HAS for d in self.file.digits):
                self.over.set()

    def fail(self, why: str, kind: type[PublishError] = PublishError) -> None:
        self.failure = kind(f"cannot fetch {self.source.what} from {self.source.url}: {why}")
        self.over.set()


class PieceFetcher:
    """Fetches files, one at a time, and passes on what it has of them until it is closed.

    `address` says where it listens for that, as `pipeline.policy_address` does; None: nowhere, and
    so it is with a loopback address if the trainer is elsewhere. `auto` is the address by which
    `towards` is reached (None: the trainer). `away` is what is known of others. `progressed` is
    when something last came.
    """

    def __init__(
        self,
        patience: Patience | None = None,
        address: str | None = None,
        *,
        towards: str | None = None,
        away: Away | None = None,
    ) -> None:
        self.patience, self.away = patience or Patience(), away or Away()
        self.progressed = time.monotonic()
        self.closed = threading.Event()
        self.server: PolicyServer | None = None
        self._address, self._towards = address, towards
        self._job: _Fetch | None = None

    def close(self) -> None:
        """Ends a fetch that is under way, and passes nothing on any more."""
        self.closed.set()
        if self.server is not None:
            self.server.close()

    def leave(self) -> None:
        """Has the trainer forget that this host has its newest file, if it answers at once."""
        if (job := self._job) is not None and self.server is not None:
            farewell = {"address": self.server.url, "digits": "", "left_out": [], "wanted": []}
            with suppress(SourceError):
                get(
                    *(job.source.url, f"/{job.source.checksum}/pieces", job.source.key, None),
                    silence_s=_LEAVE_S,
                    until=time.monotonic() + _LEAVE_S,
                    body=json.dumps(farewell).encode(),
                )

    def give_up(self, why: str) -> None:
        """Ends a fetch that is under way and does not get on."""
        job = self._job
        stuck = time.monotonic() - self.progressed > self.patience.silence_s
        if job is not None and stuck and not job.over.is_set():
            job.fail(f"{why}; {job.problem}", NotComingError)

    def fetch(self, source: Source, part: Path) -> bool:
        """Makes `part` the served file; what a killed process left there is used. Returns whether
        the trainer still has it: if not, there is no such file.

        Raises `PublishError`, which names the file and the trainer, when it does not come.
        """
        self.progressed = time.monotonic()
        self._listen(source)
        job = self._job = _Fetch(source, self.progressed + self.patience.whole_s)
        try:
            self._fetch_into(part, job)
        except OSError as exc:
            job.fail(f"{part}: {exc}", NotComingError)
        if job.failure is not None:
            raise job.failure
        if job.gone:
            part.unlink(missing_ok=True)
        return not job.gone

    def _listen(self, source: Source) -> None:
        if self._address is not None and self.server is None:
            try:
                towards = self._towards or source.url
                host, port = listening_address(self._address, towards, "its address")
                if is_loopback(source.url) or not is_loopback(host):
                    self.server = PolicyServer(source.key, host, port)
                    weakref.finalize(self, self.server.close)
            except ConfigError as exc:
                _log.warning("this host does not pass weights on: %s", exc)
            self._address = None
        if self.server is not None:
            self.server.key = source.key

    def _fetch_into(self, part: Path, job: _Fetch) -> None:
        manifest = self._manifest(job)
        if manifest is None:
            return
        size, digests = manifest
        handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            digits = bytearray([MISSING]) * len(digests)
            if os.fstat(handle).st_size == size:  # left by a process that was killed
                pairs = zip(piece_digests(handle), digests, strict=True)
                digits = bytearray(HAS if a == b else MISSING for a, b in pairs)
            os.ftruncate(handle, size)
            job.file = PieceFile(handle, size, digests, digits)
            if self.server is not None:
                served = PieceFile(os.dup(handle), size, digests, digits)
                self.server.put(job.source.checksum, served)
            if MISSING in digits:
                for _ in range(2):
                    threading.Thread(target=self._work, args=(job,), daemon=True).start()
                while not job.over.wait(_LOOK_S):  # both may be at a long piece
                    self._share(job, [])
                    self._wait(job)
                if job.failure is None and not job.gone:
                    self._share(job, [])
        finally:
            job.over.set()
            with job.lock:  # a thread that comes too late writes nothing
                os.close(handle)

    def _manifest(self, job: _Fetch) -> tuple[int, list[bytes]] | None:
        """The size and the pieces' checksums, from the trainer; None if the job is over."""
        while not job.over.is_set():
            try:
                data = self._get(job, job.source.url, self.patience.piece_s, "/pieces")
                return read_manifest(data, job.source.checksum, job.source.url)
            except SourceError as exc:
                self._leave(job, job.source.url, exc)
            self._wait(job)
        return None

    def _get(
        self,
        job: _Fetch,
        url: str,
        seconds: float,
        what: str = "",
        size: int | None = None,
        start: int = 0,
        body: bytes = b"",
    ) -> bytes:
        def given_up(came: int) -> bool:
            if came and size is not None:
                self.progressed = time.monotonic()
            # Announce what is here until the end, even if nothing is missing any more.
            return self.closed.is_set() or (job.over.is_set() and not body)

        return get(
            *(url, f"/{job.source.checksum}{what}", job.source.key, size, start),
            silence_s=self.patience.silence_s,
            until=min(time.monotonic() + seconds, job.until),
            given_up=given_up,
            body=body,
        )

    def _wait(self, job: _Fetch) -> None:
        now = time.monotonic()
        waited = now - self.progressed
        if job.over.is_set():
            return
        if self.closed.is_set():
            job.fail("the fetch was ended here", NotComingError)
        elif now > job.until:
            digits, whole_s = job.file.digits, self.patience.whole_s
            came = f"{digits.count(HAS)} of {len(digits)} pieces came within {whole_s:.3g} s"
            if not digits:
                came = f"nothing came within {whole_s:.3g} s; {job.problem}"
            job.fail(came, NotComingError)
        elif waited > self.patience.deadline_s:
            hint = ""
            if is_loopback(job.source.url):
                hint = (
                    " (that is a loopback address: for other machines, set the trainer's "
                    "pipeline.policy_address, or inference.publish_address)"
                )
            job.fail(f"nothing came for {waited:.3g} s; {job.problem}{hint}", NotComingError)
        else:
            job.over.wait(_POLL_S)

    def _work(self, job: _Fetch) -> None:
        """Fetches pieces until all are here."""
        try:
            while not job.over.is_set():
                if (chosen := self._next(job)) is None:
                    self._wait(job)
                else:
                    self._take(job, *chosen)
                    del job.asked[chosen[1]]
        except Exception as exc:  # the other thread must hear of it, whatever it is
            kind = NotComingError if isinstance(exc, OSError) else PublishError
            job.fail(f"{type(exc).__name__}: {exc}", kind)

    def _take(self, job: _Fetch, piece: int, url: str) -> None:
        file, start = job.file, piece * PIECE
        limit_s = _TRAINER_PIECE_S if url == job.source.url else self.patience.piece_s
        try:
            data = self._get(job, url, limit_s, "", min(PIECE, file.size - start), start)
            if sha256(data).digest() != file.digests[piece]:
                raise SourceError(url, f"piece {piece} has a wrong checksum", kind="wrong")
        except SourceError as exc:
            job.mark(piece, MISSING)
            self._leave(job, url, exc)
            if not job.over.is_set():
                self._wait(job)
            return
        self.progressed = time.monotonic()
        self.away.reached |= url != job.source.url
        job.mark(piece, HAS, data)

    def _leave(self, job: _Fetch, url: str, why: SourceError) -> None:
        """Asks a host no more for this file; the trainer is asked again, unless it is no use."""
        if job.over.is_set() or self.closed.is_set():
            return
        if url != job.source.url:
            job.left_out.add(url)
            if why.kind in ("silent", "slow") and time.monotonic() < job.until:
                self.away.note(url)
            self.progressed = time.monotonic()  # once for each: the trainer's time begins now
            _log.warning("nothing more of %s is taken from %s", job.source.what, why)
            return
        job.failed = True
        job.wrong += why.kind in ("wrong", "slow")
        if why.status == 401:
            # Perhaps a new trainer at the same address: the newest policy has its key.
            refused = "it refuses the run's key: is it the trainer of this run?"
            job.fail(refused, NotComingError)
        elif why.status == 404:
            job.gone = True
            job.over.set()
        elif job.wrong >= _WRONG:
            is_wrong = why.kind == "wrong"
            job.fail(f"{why}, {_WRONG} times", PublishError if is_wrong else NotComingError)
        elif why.kind == "refused" and self.patience.once:
            job.fail(f"{why}: has the trainer ended?", NotComingError)
        job.problem = str(why)

    def _next(self, job: _Fetch) -> tuple[int, str] | None:
        """The piece to take now, and from whom: from the trainer one that nobody has, unless it
        sends one already, else from a host that has it. None: there is none at the moment."""
        with job.sharing:  # so that the other thread chooses neither the same piece nor host
            pieces = [piece for piece, digit in enumerate(job.file.digits) if digit == MISSING]
            missing = random.sample(pieces, len(pieces))
            wanted = [] if job.source.url in job.asked else missing[:_ASK_FOR]
            claimed, others = self._share(job, wanted)
            hosts = [url for url in others if url not in {*job.asked, *job.left_out}]
            choices = (
                (piece, url)
                for piece in missing
                for url in random.sample(hosts, len(hosts))
                if others[url][piece : piece + 1] == bytes([HAS])
            )
            chosen = (claimed, job.source.url) if claimed >= 0 else next(choices, None)
            now = time.monotonic()
            if chosen is not None:
                job.mark(chosen[0], CLAIMED)
                job.asked[chosen[1]] = now
            elif wanted and not job.failed:  # others have claimed what is missing
                self.progressed = now
            return chosen

    def _share(self, job: _Fetch, wanted: list[int]) -> tuple[int, dict[str, bytes]]:
        """Announces which pieces are here; returns the piece to ask the trainer for (or -1), and
        what others have. If the trainer, which knows that, does not answer, nobody is asked."""
        with job.sharing:  # an announcement that arrives late would take a claim back
            now = time.monotonic()
            # A host that is slow with a piece keeps nobody from asking the trainer for others.
            slow = [url for url, since in list(job.asked.items()) if now - since > CLAIM_S]
            report = {
                "address": "" if self.server is None else self.server.url,
                "digits": job.file.digits.decode(),
                "left_out": [*job.left_out, *slow],
                "wanted": wanted,
            }
            body, trainer = json.dumps(report).encode(), job.source.url
            try:
                limit_s = self.patience.piece_s
                answer = json.loads(self._get(job, trainer, limit_s, "/pieces", body=body))
                claimed = int(answer["claimed"])
                others = {str(host): str(digits).encode() for host, digits in answer["others"]}
                if claimed != -1 and claimed not in wanted:
                    raise ValueError(f"piece {claimed} was not asked for")
            except (SourceError, ArithmeticError, KeyError, TypeError, ValueError) as exc:
                if not isinstance(exc, SourceError):
                    exc = SourceError(trainer, f"does not answer as a trainer does: {exc}")
                self._leave(job, trainer, exc)
                return -1, {}
            job.left_out.update(url for url in others if url in self.away)
            return claimed, others
