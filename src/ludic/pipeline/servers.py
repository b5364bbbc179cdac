"""The servers that sample for a run, and the processes it is made of, as Redis has them.

A server's own process says every few seconds that it serves, where, and which weights it has; one
that is silent for too long is left out. A Redis that was placed anew fills by itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
import time
import urllib.request
from http.client import HTTPException
from typing import Any, Self

from msgspec.structs import replace

from ludic.errors import DeadlineError, PipelineError
from ludic.inference.vllm.wire import UNNAMED_VERSION
from ludic.pipeline.store import Store
from ludic.plumbing.records import Record, from_json, to_json

_log = logging.getLogger("ludic.pipeline")

RENEW_S = 2.0
SILENT_S = 20.0
"""After this long without a word a server counts as gone."""
ANSWER_S = 10.0


class RegisteredServer(Record, frozen=True):
    """A server as it registers. `instance` differs from one start to the next, also at the same
    address. `version` names its weights; None: it has had none from a trainer yet. `name` is that
    of its role, where a launch has started it."""

    url: str
    instance: str
    model: str
    capacity: int
    version: int | None = None
    host: str = ""
    pid: int = 0
    name: str = ""


def list_servers(
    store: Store, silent_s: float = SILENT_S, patience_s: float | None = None
) -> list[RegisteredServer]:
    """Returns the servers that were heard of lately, by address."""
    notes = sorted(store.notes("servers", patience_s).items())
    return [from_json(RegisteredServer, text) for _, (age, text) in notes if age < silent_s]


async def wait_for_servers(
    store: Store, timeout_s: float, *, published: bool = False
) -> list[RegisteredServer]:
    """Returns the servers as soon as there is one; `published`: one with a trainer's weights."""
    deadline = time.monotonic() + timeout_s
    while True:
        listed = await asyncio.to_thread(list_servers, store)
        servers = [s for s in listed if s.version is not None or not published]
        if servers:
            return servers
        if time.monotonic() > deadline:
            what = "weights to be published to a server" if published and listed else "a server"
            whom = (
                f"the run {store.config.run!r} on {store.config.shown} (`ludic serve --register`)"
            )
            raise DeadlineError(what, whom, timeout_s)
        await asyncio.sleep(0.2)


def record_role(store: Store, name: str, node: str, state: str, restarts: int = 0) -> None:
    """Tells whoever looks (`ludic pipeline status`) where a process of the run was placed, how it
    is, and how often it was started again."""
    facts = {"node": node, "state": state, "restarts": restarts}
    store.run("note", "roles", name, json.dumps(facts))


class Registration:
    """Entered: the server at `url` is registered, and a thread asks it every `renew_s` which
    weights it has, and says so. One that does not answer is not renewed. Left: it is struck off."""

    def __init__(
        self,
        store: Store,
        url: str,
        *,
        model: str,
        capacity: int,
        key: str | None = None,
        name: str = "",
        renew_s: float = RENEW_S,
    ) -> None:
        self._store, self._renew_s = store, renew_s
        self.url, self.instance = url, secrets.token_hex(8)
        self._entry = RegisteredServer(
            *(url, self.instance, model, capacity, None, socket.gethostname(), os.getpid(), name)
        )
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="ludic-server", daemon=True)

    def __enter__(self) -> Self:
        self._say()  # raises where the server or Redis does not answer
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._left.set()
        self._thread.join(2 * ANSWER_S)
        try:
            self._store.run("note", "servers", self.url, "", patience_s=self._renew_s)
        except PipelineError as error:
            _log.warning("%s was not struck off, and is left out by itself: %s", self.url, error)

    def _renew(self) -> None:
        while not self._left.wait(self._renew_s):
            try:
                self._say(patience_s=self._renew_s)
            except PipelineError as exc:
                _log.warning("%s is not registered at the moment: %s", self.url, exc)

    def _say(self, patience_s: float | None = None) -> None:
        note = to_json(replace(self._entry, version=self._version())).decode()
        self._store.run("note", "servers", self.url, note, patience_s=patience_s)

    def _version(self) -> int | None:
        request = urllib.request.Request(f"{self.url}/weight_info", headers=self._headers)
        try:
            with self._direct.open(request, timeout=ANSWER_S) as answer:
                name: Any = json.load(answer)["weight_version"]
            return None if name in (None, UNNAMED_VERSION) else int(name)
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as exc:
            raise PipelineError(
                f"{self.url} does not say which weights it has ({exc}): a registered server is "
                "vLLM 0.32 or newer, or Ludic's own engine, started with `ludic serve`"
            ) from exc
