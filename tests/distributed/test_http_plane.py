"""Weights that each host of servers fetches once by HTTP."""

from __future__ import annotations

import gc
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ludic.distributed import piece_fetcher, shared_folders, weights_http
from ludic.distributed.in_vllm.worker import WorkerExtension
from ludic.distributed.vllm.planes import HTTPPlane
from ludic.distributed.vllm.shared_memory import FetchedWeights, open_shared
from ludic.distributed.vllm.weights_server import WeightsServer
from ludic.errors import ConfigError, PublishError
from ludic.inference import VLLMChatClient
from ludic.inference.vllm.flags import STAGE
from ludic.inference.vllm.server import free_port
from ludic.plumbing import files
from tests.inference.vllm.fake_server import FakeVLLM

WEIGHTS = {"a": torch.arange(3000.0), "b": torch.ones(5, 7, dtype=torch.bfloat16)}
SIZE = 12_070


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm; pieces are small."""
    monkeypatch.setattr(shared_folders, "shared_folder", lambda: tmp_path)
    for module in (files, weights_http, piece_fetcher):
        monkeypatch.setattr(module, "PIECE", 1000)
    return tmp_path


@pytest.fixture
def plane() -> Iterator[HTTPPlane]:
    made = HTTPPlane(timeout_s=60.0)
    yield made
    made.close()


def test_the_workers_of_a_host_fetch_once_and_read_what_was_sent(
    plane: HTTPPlane, memory: Path
) -> None:
    shipment = plane.prepare(WEIGHTS)
    source = shipment.update["source"]
    fetched = [FetchedWeights() for _ in range(8)]
    with ThreadPoolExecutor(8) as workers:
        paths = list(workers.map(lambda worker: worker.fetch(source), fetched))
    assert plane._server is not None
    assert SIZE <= plane._server.sent < 1.1 * SIZE  # once, for eight
    for worker, path in zip(fetched, paths, strict=True):
        tensors = dict(open_shared(path))
        assert all(torch.equal(tensors[name], WEIGHTS[name]) for name in WEIGHTS)
        worker.drop()
    shipment.close()
    assert torch.equal(tensors["a"], WEIGHTS["a"]), "what was mapped stays"
    assert not list(memory.iterdir())
    with pytest.raises(
        PublishError, match=f"{source['url']} does not offer these weights any more"
    ):
        fetched[0].fetch(source)
    assert not list(memory.iterdir())


def test_each_run_has_its_own_file_of_the_same_weights(plane: HTTPPlane, memory: Path) -> None:
    other = HTTPPlane(timeout_s=60.0)
    shipments = [plane.prepare(WEIGHTS), other.prepare(WEIGHTS)]
    workers = [FetchedWeights(), FetchedWeights()]
    ours, theirs = (
        worker.fetch(shipment.update["source"])
        for worker, shipment in zip(workers, shipments, strict=True)
    )
    assert not ours.samefile(theirs), "a difference changes one in place"
    for worker, shipment in zip(workers, shipments, strict=True):
        worker.drop()
        shipment.close()
    other.close()


def test_a_plane_that_nobody_has_any_more_listens_no_longer(memory: Path) -> None:
    first = HTTPPlane(timeout_s=60.0, port=(port := free_port()))
    first.prepare(WEIGHTS).close()
    del first
    gc.collect()
    again = HTTPPlane(timeout_s=60.0, port=port)
    again.prepare(WEIGHTS).close()
    again.close()


def test_a_wrong_piece_another_key_or_no_checksum_leaves_nothing_behind(
    plane: HTTPPlane, monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    shipment = plane.prepare(WEIGHTS)
    source: Any = shipment.update["source"]
    before = list(memory.iterdir())
    worker = FetchedWeights()
    with pytest.raises(PublishError, match="refuses the run's key"):
        worker.fetch({**source, "key": "another"})
    with pytest.raises(ValueError, match="not the checksum"):
        worker.fetch({**source, "checksum": "../../etc"})
    whole = weights_http.get

    def bent(url: str, path: str, *args: Any, **limits: Any) -> bytes:
        data = whole(url, path, *args, **limits)
        return data if path.endswith("pieces") else data[:-1] + bytes([data[-1] ^ 1])

    monkeypatch.setattr(piece_fetcher, "get", bent)
    with pytest.raises(PublishError, match=f"{source['url']}: piece .* a wrong checksum, 3 times"):
        worker.fetch(source)
    assert list(memory.iterdir()) == before


def test_a_trainer_that_goes_half_way_is_named_and_the_next_one_is_whole(
    plane: HTTPPlane, monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    source: Any = plane.prepare(WEIGHTS).update["source"]
    whole, gone = weights_http.get, threading.Event()

    def cut(url: str, path: str, *args: Any, **limits: Any) -> bytes:
        if not path.endswith("pieces") and not gone.is_set():
            whole(url, path, *args, **limits)
            gone.set()
            plane.close()
        return whole(url, path, *args, **limits)

    monkeypatch.setattr(piece_fetcher, "get", cut)
    worker = FetchedWeights()
    with pytest.raises(PublishError, match=f"from {source['url']}: .*has the trainer ended"):
        worker.fetch(source)
    shipment = plane.prepare(WEIGHTS)  # at another address
    path = worker.fetch(shipment.update["source"])
    assert torch.equal(dict(open_shared(path))["b"], WEIGHTS["b"])
    worker.drop()


def test_whoever_asks_while_a_server_ends_hears_nothing_and_not_that_the_policy_is_withdrawn(
    tmp_path: Path,
) -> None:
    (tmp_path / "policy").write_bytes(b"weights")
    server = weights_http.PolicyServer("key")
    checksum = server.offer(tmp_path / "policy")["checksum"]
    link = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    path = f"/{checksum}/pieces"
    headers = {"Authorization": weights_http._signature("key", path)}
    link.request("GET", path, headers=headers)
    assert link.getresponse().read()
    server.close()
    link.request("GET", path, headers=headers)  # through the connection that is there already
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        link.getresponse()


def test_a_publish_that_is_given_up_ends_on_the_hosts_at_once_and_the_next_one_is_whole(
    plane: HTTPPlane, monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    shipment = plane.prepare(WEIGHTS)
    source: Any = shipment.update["source"]
    whole = weights_http.get

    def given_up(url: str, path: str, *args: Any, **limits: Any) -> bytes:
        if not path.endswith("pieces"):
            plane.abandon()
        return whole(url, path, *args, **limits)

    monkeypatch.setattr(piece_fetcher, "get", given_up)
    worker = FetchedWeights()
    with pytest.raises(PublishError, match="does not offer these weights any more"):
        worker.fetch({**source, "timeout_s": 600.0})
    monkeypatch.setattr(piece_fetcher, "get", whole)
    shipment.close()
    again: Any = plane.prepare(WEIGHTS).update["source"]
    assert again["url"] == source["url"], "it has listened all the time"
    assert torch.equal(dict(open_shared(worker.fetch(again)))["b"], WEIGHTS["b"])
    worker.drop()


def test_a_host_hears_that_a_publish_is_given_up_also_while_its_pieces_take_long(
    plane: HTTPPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: Any = plane.prepare(WEIGHTS).update["source"]
    whole, end = weights_http.get, threading.Event()

    def long(url: str, path: str, *args: Any, **limits: Any) -> bytes:
        if not path.endswith("pieces"):
            plane.abandon()
            end.wait(60.0)
        return whole(url, path, *args, **limits)

    monkeypatch.setattr(piece_fetcher, "get", long)
    # Its other thread, which would hear of it, is at a long piece of another host.
    work, begun = piece_fetcher.PieceFetcher._work, list[Any]()

    def alone(self: Any, job: Any) -> None:
        begun.append(job)
        if len(begun) == 1:
            work(self, job)

    monkeypatch.setattr(piece_fetcher.PieceFetcher, "_work", alone)
    with pytest.raises(PublishError, match="does not offer these weights any more"):
        FetchedWeights().fetch({**source, "timeout_s": 600.0})
    assert not end.is_set()
    end.set()


def test_a_fetch_that_is_late_ends_and_leaves_the_next_ones_file_alone(
    plane: HTTPPlane, monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    first: Any = plane.prepare(WEIGHTS).update["source"]
    second: Any = plane.prepare({"a": torch.zeros(100)}).update["source"]
    whole, asked, let_go = weights_http.get, threading.Event(), threading.Event()

    def held(url: str, path: str, *args: Any, **limits: Any) -> bytes:
        if path == f"/{first['checksum']}":
            asked.set()
            assert let_go.wait(60.0)
        return whole(url, path, *args, **limits)

    monkeypatch.setattr(piece_fetcher, "get", held)
    worker = FetchedWeights()
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(worker.fetch, first)
        assert asked.wait(60.0)
        path = worker.fetch(second)
        let_go.set()
        with pytest.raises(PublishError, match="the fetch was ended here"):
            late.result(60.0)
    assert torch.equal(dict(open_shared(path))["a"], torch.zeros(100))
    worker.drop()
    assert not [folder for folder in memory.iterdir() if "fetched" in folder.name]


def test_a_host_listens_only_where_it_is_told_and_until_the_weights_are_dropped(
    plane: HTTPPlane, memory: Path
) -> None:
    shipment = plane.prepare(WEIGHTS)
    source: Any = shipment.update["source"]
    assert plane._server is not None
    with plane._server.opened(source["checksum"]) as opened:
        assert opened is not None
        quiet, passing_on = FetchedWeights(), FetchedWeights("127.0.0.1")
        quiet.fetch(source)
        assert not opened[0].hosts
        quiet.drop()
        passing_on.fetch(source)
        (url,) = opened[0].hosts
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    socket.create_connection(address, 60.0).close()
    passing_on.drop()
    deadline = time.monotonic() + 60
    while _listens(address) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _listens(address)
    shipment.close()


def test_a_host_with_a_port_of_its_own_passes_on_one_publish_after_another(
    plane: HTTPPlane, memory: Path
) -> None:
    worker = FetchedWeights(f"127.0.0.1:{(port := free_port())}")
    assert plane._server is None
    for number in range(3):
        shipment = plane.prepare({"a": torch.full((100,), float(number))})
        source: Any = shipment.update["source"]
        worker.fetch(source)  # the one before it may still be held, as after a lost publish
        assert plane._server is not None
        with plane._server.opened(source["checksum"]) as opened:
            assert opened is not None
            assert [*opened[0].hosts] == [f"http://127.0.0.1:{port}"]
        shipment.close()
    worker.drop()


def _listens(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


def test_a_worker_fetches_in_a_thread_and_says_when_it_is_done_or_why_not(
    plane: HTTPPlane,
) -> None:
    worker: Any = WorkerExtension()
    assert "without the weight transfer" in worker.ludic_fetch({})["error"]
    worker.weight_transfer_engine = SimpleNamespace(fetched=FetchedWeights())
    shipment = plane.prepare(WEIGHTS)
    source: Any = shipment.update["source"]
    deadline = time.monotonic() + 60
    while not worker.ludic_fetch(source)["fetched"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker.ludic_fetch(dict(source)) == {"fetched": True}, "and it stays"
    assert plane._server is not None
    assert plane._server.sent < 1.1 * SIZE
    shipment.close()
    worker.weight_transfer_engine.fetched.drop()
    while "error" not in (answer := worker.ludic_fetch(source)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert answer == {"error": f"{source['url']} does not offer these weights any more"}
    assert "checksum" in worker.ludic_fetch({**source, "checksum": "x"})["error"]


async def test_an_update_is_taken_in_when_every_worker_has_fetched_and_not_before() -> None:
    answers = [[True, False], [False, False], [True, True]]

    def fetched(_: Any) -> Any:
        if not answers:
            return {"results": [{"fetched": True}, {"error": "no room"}]}
        return {"results": [{"fetched": done} for done in answers.pop(0)]}

    def staged(_: Any) -> Any:
        return {"results": [{"tensors": {}}] * 2}

    async with (
        FakeVLLM(faults={"/collective_rpc": fetched, STAGE: staged}).serving() as fake,
        VLLMChatClient(fake.url, model="tiny") as client,
    ):
        server = WeightsServer(client, client.replicas[0], 60.0, 60.0)
        await server.receive({"plane": "http", "source": {"url": "http://trainer"}})
        assert fake.order[-4:] == [*["/collective_rpc"] * 3, STAGE]
        with pytest.raises(PublishError, match="did not fetch the weights: no room"):
            await server.receive({"plane": "http", "source": {"url": "http://trainer"}})
        assert fake.calls[STAGE] == 1


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inference.publish_address"):
        HTTPPlane(host="192.0.2.7").prepare(WEIGHTS)
