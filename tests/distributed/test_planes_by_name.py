"""Planes by name: where they listen, on which device, and over two processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from ludic.distributed import BroadcastPolicyPublisher, Snapshot
from ludic.distributed.vllm import planes
from ludic.distributed.vllm.placement import Place
from ludic.distributed.vllm.planes import BroadcastPlane, HTTPPlane, SharedMemoryPlane, open_plane
from ludic.errors import ConfigError
from ludic.inference import VLLMChatClient
from tests.inference.vllm.fake_server import FakeVLLM

CPU = torch.device("cpu")
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}

RECEIVER = """
import json, sys, torch
from ludic.distributed.vllm.planes import BroadcastGroup
said = json.loads(sys.stdin.readline())
group = BroadcastGroup(**said["invitation"], rank=1)
sums = {}
for meta in said["tensors"]:
    tensor = torch.empty(meta["shape"], dtype=getattr(torch, meta["dtype"]))
    group.broadcast(tensor)
    sums[meta["name"]] = tensor.float().tolist()
print(json.dumps(sums))
"""


def test_a_device_without_an_index_gets_one() -> None:
    assert BroadcastPlane(backend="nccl").device.index is not None
    assert BroadcastPlane(backend="nccl", device="cuda:3").device == torch.device("cuda", 3)
    assert BroadcastPlane(backend="gloo").device == CPU


async def at(place: Any, **settings: Any) -> Any:
    server = FakeVLLM(faults={"/collective_rpc": lambda _: {"results": [place]}})
    async with server.serving() as fake, VLLMChatClient(fake.url, model="tiny") as client:
        return await open_plane(client, CPU, **settings)


async def test_a_broadcast_by_name_listens_where_the_servers_reach_it() -> None:
    plane, choice = await at({"memory": "elsewhere"}, named="gloo")
    assert (plane.backend, plane.host, plane.device) == ("gloo", "127.0.0.1", CPU)
    assert choice.why == "it was named"
    plane, choice = await at({"memory": "elsewhere"}, host="127.0.0.3", port=4)
    assert (plane.name, plane.host, plane.port) == ("http", "127.0.0.3", 4)
    assert choice.why.endswith("NCCL is not possible: the trainer's weights are not on a GPU")


async def test_beside_a_server_on_loopback_one_elsewhere_reaches_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {"127.0.0.1": "127.0.0.1", "localhost": "10.0.0.3"}  # as if that were another machine
    monkeypatch.setattr(planes, "own_address", lambda url: seen[urlsplit(url).hostname or ""])
    server = FakeVLLM(faults={"/collective_rpc": lambda _: {"results": [{"memory": "elsewhere"}]}})
    async with server.serving() as fake:
        urls = [fake.url, fake.url.replace("127.0.0.1", "localhost")]
        async with VLLMChatClient(urls, model="tiny") as client:
            plane, _ = await open_plane(client, CPU)
    assert isinstance(plane, HTTPPlane)
    assert plane.host == "10.0.0.3"


async def test_auto_asks_the_workers_and_not_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer on one GPU, the server on another: once this took CUDA IPC."""
    here = Place.of(CPU)
    monkeypatch.setattr(Place, "of", staticmethod(lambda _: Place(here.memory, "GPU-0")))
    plane, choice = await at({"memory": here.memory, "gpu": "GPU-1"})
    assert isinstance(plane, SharedMemoryPlane)
    assert choice.why == "every worker sees this host's shared memory"
    assert (await at({"memory": here.memory, "gpu": "GPU-0"}))[0].name == "ipc"
    assert (await at({"memory": here.memory, "gpu": "GPU-0"}, gathered=True))[0].name != "ipc"
    with pytest.raises(ConfigError, match='"ipc" cannot work here: 1 of 1 workers'):
        await at({"memory": here.memory, "gpu": "GPU-1"}, named="ipc")


async def test_a_publisher_asks_at_its_first_publish_and_says_why() -> None:
    async with FakeVLLM().serving() as fake, VLLMChatClient(fake.url, model="tiny") as client:
        publisher = BroadcastPolicyPublisher(client, canary=False)
        assert publisher.choice is None
        await publisher.publish(Snapshot(WEIGHTS, device=CPU), 1)
        assert publisher.choice is not None
        assert publisher.choice.plane == "shared_memory"
        assert fake.applied == 1


def test_two_processes_meet_over_gloo_by_name_as_they_would_over_nccl() -> None:
    plane, _ = asyncio.run(at({"memory": "elsewhere"}, named="gloo"))
    invitation, shipment = plane.invitation(1, 60.0), plane.prepare(WEIGHTS)
    with subprocess.Popen(
        [sys.executable, "-c", RECEIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as receiver:
        try:
            assert receiver.stdin is not None
            told = {"invitation": invitation, "tensors": shipment.update["tensors"]}
            receiver.stdin.write(json.dumps(told) + "\n")
            receiver.stdin.flush()
            plane.join()
            shipment.move()
            answer, _ = receiver.communicate(timeout=60)
        finally:
            receiver.kill()
    plane.abandon()
    assert json.loads(answer) == {name: t.float().tolist() for name, t in WEIGHTS.items()}
