"""Servers and roles in Redis: who is listed, who is left out, and what an emptied Redis knows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from ludic.errors import DeadlineError, PipelineError
from ludic.pipeline.servers import Registration, list_servers, wait_for_servers
from ludic.pipeline.store import Store
from tests.pipeline.world import server_of

pytestmark = pytest.mark.redis


class Weights(BaseHTTPRequestHandler):
    """Says which weights it has, to those who have the key."""

    name = "default"

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer secret"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(b'{"weight_version": "%s"}' % type(self).name.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Weights.name = "default"
    with HTTPServer(("127.0.0.1", 0), Weights) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def registered(store: Store, url: str, key: str = "secret") -> Registration:
    return Registration(store, url, model="tiny", capacity=8, key=key, renew_s=0.05)


def until(store: Store, wanted: Any) -> None:
    """Waits for a list of servers that is as wanted."""
    deadline = time.monotonic() + 60
    while not wanted(list_servers(store)):
        assert time.monotonic() < deadline, list_servers(store)
        time.sleep(0.02)


def test_a_server_is_listed_with_its_version_for_as_long_as_it_is_registered(
    store: Store, url: str
) -> None:
    with registered(store, url) as registration:
        (server,) = list_servers(store)
        assert (server.url, server.model, server.capacity) == (url, "tiny", 8)
        assert server.version is None, "it has had none from a trainer"
        Weights.name = "3"
        until(store, lambda servers: servers[0].version == 3)
        assert list_servers(store)[0].instance == registration.instance
        assert list_servers(store, silent_s=0) == [], "after that long a silence it is left out"
    assert list_servers(store) == []


def test_a_redis_that_lost_its_data_knows_the_servers_again(store: Store, url: str) -> None:
    with registered(store, url):
        store.forget()
        until(store, lambda servers: len(servers) == 1)


def test_a_server_that_does_not_answer_is_not_renewed(store: Store, url: str) -> None:
    with pytest.raises(PipelineError, match="does not say which weights it has"):
        registered(store, url, key="wrong").__enter__()
    with registered(store, url):
        Weights.name = "not a number"
        time.sleep(0.2)
        server_of(store).delete(store.keys["servers"])
        time.sleep(0.2)
        assert list_servers(store) == []


async def test_who_waits_for_servers_hears_what_for(store: Store, url: str) -> None:
    with pytest.raises(DeadlineError, match=r"a server .*ludic serve --register"):
        await wait_for_servers(store, 0.0)
    with registered(store, url):
        assert [server.url for server in await wait_for_servers(store, 60.0)] == [url]
        with pytest.raises(DeadlineError, match="weights to be published"):
            await wait_for_servers(store, 0.0, published=True)
