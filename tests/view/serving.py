"""The application on a free port of this machine, and requests to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn

from ludic.view.app import make_app

TOKEN = "a-token-for-tests"


class Served:
    """The application on a free port."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def link(self, hash_: str = "") -> str:
        """The address of a page, with the token."""
        return f"{self.address}?token={TOKEN}{hash_}"

    def get(
        self, path: str, *, token: bool = True, method: str = "GET", **headers: Any
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """One request, exactly as it is given: no path is tidied up."""
        sent = {"Host": f"127.0.0.1:{self.port}"}
        if token:
            sent["Cookie"] = f"ludic-view-{self.port}={TOKEN}"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def ask(self, name: str, **params: Any) -> Any:
        """The data of a page; an error of the server is one of the test."""
        status, _, body = self.get(f"/api/{name}?{urlencode(params, doseq=True)}")
        data = json.loads(body)
        assert status == 200, data
        return data

    def indexed(self, run: str, rollouts: int) -> None:
        """Returns when the run's index has so many rollouts."""
        for _ in range(600):
            if self.ask("state", run=run)["rollouts"] >= rollouts:
                return
            threading.Event().wait(0.1)
        raise AssertionError(f"{run} was not indexed within a minute")


@contextmanager
def serving(*roots: Path) -> Iterator[Served]:
    """Serves folders until the end of the block."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # a request that comes early waits
    config = uvicorn.Config(make_app(roots, token=TOKEN), log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    try:
        yield Served(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
