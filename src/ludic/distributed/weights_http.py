"""Weights by HTTP, for hosts that do not share a folder with the trainer: the serving side.

The trainer serves its files by checksum, in pieces of 16 MiB; hosts serve the pieces that they have
in the same way. The trainer knows which host has which piece, and a host claims a piece before it
asks the trainer for it. So each piece leaves the trainer once, however many hosts there are.

Requests are signed with the run's key.
"""

from __future__ import annotations

import hmac
import http.client
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from ludic.errors import ConfigError, LudicError
from ludic.plumbing.files import PIECE, piece_digests

_log = logging.getLogger("ludic.pipeline")
MISSING, HAS, CLAIMED = b"012"
_MAX_MANIFEST, _MAX_ASKED = 1 << 24, 1 << 20
_MAX_CONNECTIONS = 256
CLAIM_S = 5.0
"""For how long a piece is left to the host that claimed it: 16 MiB at 27 Mbit/s."""
_HOST_S = 600.0
"""After this long without a word a host counts as gone."""
_CONNECT_S = 3.0
_IDLE_S, _SILENCE_S = 30.0, 30.0


def _signature(key: str, path: str, body: bytes = b"") -> str:
    return "Ludic " + hmac.new(key.encode(), path.encode() + body, sha256).hexdigest()


@dataclass(slots=True)
class PieceFile:
    """An open file, and which of its pieces are there: a digit each, `0` missing, `1` there, `2`
    claimed. It stays readable when its name is removed. Whoever fetches writes a digit once the
    piece is in the file; threads that serve read it. `hosts` has the digits of others, by address,
    and when they said so; `claims` has who claimed a piece last, and when. Both change under the
    lock of the server."""

    handle: int
    size: int
    digests: list[bytes] = field(default_factory=list)
    digits: bytearray = field(default_factory=bytearray)
    used: float = field(default_factory=time.monotonic)
    hosts: dict[str, tuple[float, bytes]] = field(default_factory=dict)
    claims: dict[int, tuple[str, float]] = field(default_factory=dict)
    hashing: threading.Lock = field(default_factory=threading.Lock)

    def manifest(self) -> bytes:
        with self.hashing:  # several may ask at once; the file is read once
            if not self.digests:
                self.digests = piece_digests(self.handle)
        pieces = [digest.hex() for digest in self.digests]
        return json.dumps({"size": self.size, "pieces": pieces}).encode()

    def has(self, start: int, end: int) -> bool:
        """Whether these bytes are there; a file that is not being fetched has all."""
        pieces = self.digits[start // PIECE : (end - 1) // PIECE + 1]
        return 0 <= start < end <= self.size and all(digit == HAS for digit in pieces)


class PolicyServer:
    """Serves files to whoever has the key, read-only, from threads of its own.

    The newest `keep` offers are there, and older ones for as long as somebody fetches them. A
    receiver that takes nothing for half a minute is cut off. `host` is an address of this machine;
    port 0 is any free one. `sent` counts the bytes of the pieces.
    """

    def __init__(self, key: str, host: str = "127.0.0.1", port: int = 0, *, keep: int = 2) -> None:
        self.key, self.keep, self.sent = key, keep, 0
        self._files: dict[str, PieceFile] = {}
        self._lock = threading.Lock()
        served = self

        class Handler(_Handler):
            timeout = _SILENCE_S
            policies = served

        try:
            self._http = _Listening((host, port), Handler)
        except OSError as exc:
            raise ConfigError(
                f"cannot serve policies on {host}:{port}: {exc}. Set pipeline.policy_address (of "
                "a trainer with servers inference.publish_address, of a server --pass-on) to an "
                "address of this machine, with a port that is free or with none"
            ) from exc
        self._http.sweep = self._sweep
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._http.server_address[1]}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="ludic-policies", daemon=True
        )
        self._thread.start()

    def offer(self, path: Path, checksum: str = "") -> dict[str, Any]:
        """Serves a file, as it is now; returns what to announce of it. Without its checksum the
        file is read for it."""
        handle = os.open(path, os.O_RDONLY)
        file = PieceFile(handle, os.fstat(handle).st_size)
        if not checksum:
            file.digests = piece_digests(handle)
            checksum = sha256(b"".join(file.digests)).hexdigest()
        self.put(checksum, file)
        return {"url": self.url, "key": self.key, "checksum": checksum}

    def withdraw(self, checksum: str | None = None) -> None:
        """Serves a file (None: any) no longer, except to those who fetch a piece of it now."""
        with self._lock:
            for name in list(self._files) if checksum is None else [checksum]:
                if (file := self._files.pop(name, None)) is not None:
                    os.close(file.handle)

    def put(self, checksum: str, file: PieceFile) -> None:
        """Serves what is there of a file, whose handle is closed when nobody needs it."""
        with self._lock:
            before = self._files.pop(checksum, None)
            self._files[checksum] = file
        if before is not None and before is not file:
            os.close(before.handle)

    @contextmanager
    def opened(self, checksum: str) -> Iterator[tuple[PieceFile, int] | None]:
        """An offered file and a handle that stays open meanwhile; None if there is none."""
        with self._lock:
            file = self._files.get(checksum)
            if file is not None:
                file.used = time.monotonic()
                handle = os.dup(file.handle)
        if file is None:
            yield None
            return
        try:
            yield file, handle
        finally:
            file.used = time.monotonic()
            os.close(handle)

    def share(self, file: PieceFile, asked: Mapping[str, Any]) -> bytes:
        """Hears what a host has; answers which of the pieces that it wants from here is now its own
        to ask for (-1: none), and what the others have, but for those that it has left out. One
        without an address only looks; one without digits is forgotten. A claim ends after a while,
        also where its host still fetches: a slow line keeps a piece from nobody."""
        address, digits = str(asked["address"]), bytearray(str(asked["digits"]).encode())
        left_out, now = {address, *asked["left_out"]}, time.monotonic()

        def is_taken(piece: int) -> bool:
            holder, since = file.claims.get(piece, ("", 0.0))
            if now - since < CLAIM_S and others.get(holder, b"")[piece : piece + 1] == b"2":
                return True
            return any(theirs[piece : piece + 1] == b"1" for theirs in others.values())

        with self._lock:
            file.hosts = {url: word for url, word in file.hosts.items() if now - word[0] < _HOST_S}
            others = {url: word[1] for url, word in file.hosts.items() if url not in left_out}
            if (claimed := next((n for n in asked["wanted"] if not is_taken(n)), -1)) >= 0:
                digits[claimed] = CLAIMED
                file.claims[claimed] = address, now
            if address and digits:
                file.hosts[address] = now, bytes(digits)
            else:
                file.hosts.pop(address, None)
        rows = [[url, theirs.decode()] for url, theirs in others.items()]
        return json.dumps({"claimed": claimed, "others": rows}).encode()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def count(self, sent: int) -> None:
        with self._lock:
            self.sent += sent

    def _sweep(self) -> None:
        limit = time.monotonic() - _IDLE_S
        with self._lock:
            for checksum in list(self._files)[: -self.keep]:
                if self._files[checksum].used < limit:
                    os.close(self._files.pop(checksum).handle)

    def close(self) -> None:
        """Accepts nobody any more, and closes the files."""
        if not self._thread.is_alive():
            return
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)
        self.withdraw()


class _Listening(ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 128
    sweep: Any = None

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's would look the name up, which may take long

    def service_actions(self) -> None:
        self.sweep()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request from %s ended early", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """`GET /CHECKSUM/pieces` is a manifest, `GET /CHECKSUM` with a range is a part of the file,
    `POST /CHECKSUM/pieces` says what a host has, and asks who has what."""

    protocol_version = "HTTP/1.1"
    policies: PolicyServer

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if 0 < length <= _MAX_ASKED:
            self.do_GET(self.rfile.read(length))
        else:
            self.close_connection = True
            self._answer(413, b"too long, or nothing")

    def do_GET(self, body: bytes = b"") -> None:
        signature = _signature(self.policies.key, self.path, body).encode()
        authorization = (self.headers.get("Authorization") or "").encode()
        checksum, _, what = self.path.strip("/").partition("/")
        if not hmac.compare_digest(authorization, signature):
            self._answer(401, b"another key")
            return
        with self.policies.opened(checksum) as opened:
            if opened is None and self.policies.has_ended:
                self.close_connection = True  # it did not withdraw this policy: it is gone
            elif opened is None:
                self._answer(404, b"no such policy")
            elif what == "pieces":
                file, _ = opened
                if body:
                    self._answer(200, self.policies.share(file, json.loads(body)))
                else:
                    self._answer(200, file.manifest())
            else:
                self._send(*opened)

    def _send(self, file: PieceFile, handle: int) -> None:
        bounds = re.fullmatch(r"bytes=(\d{1,18})-(\d{1,18})", self.headers.get("Range") or "")
        start, end = (int(bounds[1]), int(bounds[2]) + 1) if bounds else (0, 0)
        if not file.has(start, end):
            self._answer(416, b"not here, or not yet")
            return
        self._head(206, end - start)
        with open(handle, "rb", closefd=False) as content:
            self.connection.sendfile(content, start, end - start)
        self.policies.count(end - start)

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.flush()

    def _answer(self, status: int, body: bytes) -> None:
        self._head(status, len(body))
        self.wfile.write(body)


class SourceError(LudicError):
    """A source that failed. `status` is its HTTP status, if it had one. `kind`: `refused` (nobody
    listens there), `silent`, `slow` or `wrong`, where it is one of those."""

    def __init__(self, url: str, why: object, status: int = 0, kind: str = "") -> None:
        super().__init__(f"{url}: {why}")
        self.status, self.kind = status, kind


def get(
    url: str,
    path: str,
    key: str,
    size: int | None,
    start: int = 0,
    *,
    silence_s: float,
    until: float,
    given_up: Callable[[int], bool] = lambda _: False,
    body: bytes = b"",
) -> bytes:
    """The `size` bytes from `start` on of what a source has at `path`; all of it with None. With a
    `body`, its answer to that.

    Raises `SourceError` when it cannot be reached within three seconds, when nothing comes for
    `silence_s`, not all by the time `until`, or when `given_up` says so, which is asked with how
    many bytes have come.
    """
    address, patience_s = urlsplit(url), min(silence_s, _CONNECT_S)
    link = http.client.HTTPConnection(address.hostname or "", address.port, timeout=patience_s)
    headers = {"Authorization": _signature(key, path, body)}
    if size is not None:
        headers["Range"] = f"bytes={start}-{start + size - 1}"
    try:
        link.connect()
        link.sock.settimeout(silence_s)
        link.request("POST" if body else "GET", path, body or None, headers)
        answer = link.getresponse()
        if answer.status not in (200, 206):
            raise SourceError(url, f"status {answer.status}", answer.status)
        length = int(answer.headers.get("Content-Length") or -1)
        if length != size if size is not None else not 0 <= length <= _MAX_MANIFEST:
            raise SourceError(url, f"sends {length} bytes")
        data = bytearray(length)
        filled = 0
        while filled < length:
            if given_up(filled):
                raise SourceError(url, "is not needed any more")
            if time.monotonic() > until:
                why = f"is too slow: {filled} of {length} bytes came in time"
                raise SourceError(url, why, kind="slow")
            # What is there: to wait for more would be to wait for a source that drips.
            if not (came := answer.read1(min(length - filled, 1 << 18))):
                raise SourceError(url, f"broke off after {filled} of {length} bytes")
            data[filled : filled + len(came)] = came
            filled += len(came)
        return bytes(data)
    except (OSError, ValueError, http.client.HTTPException) as exc:
        kind = "refused" if isinstance(exc, ConnectionRefusedError) else ""
        if isinstance(exc, OSError) and not isinstance(exc, ConnectionError):
            kind = "silent"
        raise SourceError(url, str(exc) or type(exc).__name__, kind=kind) from exc
    finally:
        link.close()


def read_manifest(data: bytes, checksum: str, url: str) -> tuple[int, list[bytes]]:
    """A manifest that fits the checksum, whoever sent it."""
    try:
        manifest = json.loads(data)
        size, digests = int(manifest["size"]), [bytes.fromhex(p) for p in manifest["pieces"]]
    except (ArithmeticError, ValueError, KeyError, TypeError) as exc:
        raise SourceError(url, "sends no manifest") from exc
    if sha256(b"".join(digests)).hexdigest() != checksum:
        raise SourceError(url, "sends the manifest of another policy")
    if len(digests) != -(-size // PIECE):
        raise SourceError(url, f"sends a manifest of {len(digests)} pieces for {size} bytes")
    return size, digests
