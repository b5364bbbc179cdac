"""`BroadcastPolicyPublisher` and what it is made of, with servers that fail on demand.

The same against real servers is in `tests/inference/vllm/`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.shared_folders import shared_folder
from ludic.distributed.vllm.canary import MismatchBudget, canary_tokens
from ludic.distributed.vllm.planes import (
    BroadcastGroup,
    BroadcastPlane,
    IPCPlane,
    SharedMemoryPlane,
)
from ludic.distributed.vllm.shared_memory import open_shared, write_shared
from ludic.errors import ConfigError, DeadlineError, PublishError
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.flags import STAGE
from ludic.inference.vllm.server import free_port
from ludic.sharding.weights import ModelWeights
from tests.inference.vllm.fake_server import FakeVLLM, failing, hanging, receipts

pytestmark = pytest.mark.usefixtures("clock")

WEIGHTS = {"a.weight": torch.arange(12.0).view(3, 4), "b.bias": torch.ones(5)}


@pytest.fixture
async def fakes() -> AsyncIterator[tuple[FakeVLLM, FakeVLLM]]:
    async with FakeVLLM().serving() as first, FakeVLLM().serving() as second:
        yield first, second


@pytest.fixture
async def client(fakes: tuple[FakeVLLM, FakeVLLM]) -> AsyncIterator[VLLMChatClient]:
    async with VLLMChatClient([f.url for f in fakes]) as found:
        yield found


Fakes = tuple[FakeVLLM, FakeVLLM]


async def test_a_publish_reaches_every_server_and_leaves_them_running(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    report = await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)
    assert report.verified
    assert report.bytes == 4 * 17
    assert set(report.details["servers"]) == {f.url for f in fakes}
    for fake in fakes:
        assert (fake.version, fake.paused, fake.active) == ("3", False, False)
        assert fake.calls["/reset_prefix_cache"] == 1
    assert not list(shared_folder().glob(f"ludic-publish-{os.getpid()}-*"))
    assert client.version == 3


@pytest.mark.parametrize("path", [STAGE, "/collective_rpc"])
async def test_a_refusal_before_the_weights_are_used_puts_everyone_back(
    client: VLLMChatClient, fakes: Fakes, path: str
) -> None:
    fakes[1].faults[path] = failing(500)
    with pytest.raises(PublishError, match="made to fail with 500") as caught:
        await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)
    assert all(f.url in str(caught.value).split("go on with the versions before")[1] for f in fakes)
    assert all(f.version == "default" and f.calls["/pause"] == 0 for f in fakes)
    assert len(client.in_rotation()) == 2


async def test_a_server_that_fails_while_it_applies_is_out_and_the_other_goes_on(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    fakes[1].faults["/finish_weight_update"] = failing(500)
    publisher = BroadcastPolicyPublisher(client)
    report = await publisher.publish(WEIGHTS, 3)
    assert report.details["servers"] == [fakes[0].url]
    assert "failed while it applied version 3" in report.details["lost"][fakes[1].url]
    assert [r.url for r in client.in_rotation()] == [fakes[0].url]
    # A later publish that succeeds brings it back.
    del fakes[1].faults["/finish_weight_update"]
    await publisher.publish(WEIGHTS, 4)
    assert len(client.in_rotation()) == 2


async def test_when_nobody_could_apply_it_the_trainer_is_told(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    for fake in fakes:
        fake.faults["/finish_weight_update"] = failing(500)
    with pytest.raises(PublishError, match="no server is left for version 3"):
        await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)
    assert client.in_rotation() == []


async def test_a_server_that_cannot_be_resumed_is_out(client: VLLMChatClient, fakes: Fakes) -> None:
    fakes[0].faults[STAGE] = failing(500)
    fakes[1].faults["/resume"] = failing(500)
    with pytest.raises(PublishError, match=r"out of rotation.*could not be resumed"):
        await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)
    assert [r.url for r in client.in_rotation()] == [fakes[0].url]


@pytest.mark.parametrize(
    ("receipt", "says"),
    [
        (lambda t: {**t, "b.bias": ["1", "float32", [5]]}, r"1 arrived changed \['b.bias'\]"),
        (lambda t: {"b.bias": t["b.bias"]}, r"1 tensors did not arrive \['a.weight'\]"),
        (lambda t: {**t, "b.bias": [t["b.bias"][0], "float16", [5]]}, "arrived changed"),
    ],
)
async def test_what_did_not_arrive_as_it_was_sent_is_not_used(
    client: VLLMChatClient, fakes: Fakes, receipt: Any, says: str
) -> None:
    fakes[0].faults[STAGE] = receipts(fakes[0], lambda said: {"tensors": receipt(said["tensors"])})
    with pytest.raises(PublishError, match=says):
        await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)
    assert all(f.version == "default" and f.calls["/pause"] == 0 for f in fakes)


async def test_a_server_without_our_extension_is_told_apart(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    fakes[0].faults["/collective_rpc"] = lambda _: {"results": [{"error": "no backend 'ludic'"}]}
    with pytest.raises(PublishError, match="no backend 'ludic'"):
        await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)


async def test_a_server_with_a_transfer_of_its_own_is_named_with_the_remedy(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    fakes[1].faults["/collective_rpc"] = failing(500)
    with pytest.raises(PublishError, match=rf"{fakes[1].url} was started without.*ludic serve"):
        await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)
    assert len(client.in_rotation()) == 2


async def test_a_server_that_hangs_meets_the_deadline_and_the_others_are_resumed(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    fakes[1].faults[STAGE] = hanging
    with pytest.raises(DeadlineError, match="the publish of version 3"):
        await BroadcastPolicyPublisher(client, timeout_s=0.5).publish(WEIGHTS, 3)
    assert not fakes[0].paused
    assert fakes[0].version == "default"
    # Nobody can say whether the other still works on it: it gets no requests, those it had end.
    assert [r.url for r in client.in_rotation()] == [fakes[0].url]
    assert "could not be resumed" in str(client.replicas[1].out)


async def test_a_server_without_the_routes_is_told_what_it_lacks() -> None:
    older = ("/v1/models", "/version", "/openapi.json", "/v1/completions")
    async with FakeVLLM(routes=older).serving() as fake, VLLMChatClient(fake.url) as client:
        with pytest.raises(ConfigError, match="no routes for weight updates"):
            await BroadcastPolicyPublisher(client).publish(WEIGHTS, 1)


async def test_a_server_that_keeps_no_versions_is_stamped_by_the_client() -> None:
    routes = tuple(r for r in FakeVLLM().routes if r != "/weight_info")
    async with FakeVLLM(routes=routes).serving() as fake, VLLMChatClient(fake.url) as client:
        await BroadcastPolicyPublisher(client).publish(WEIGHTS, 6)
        assert fake.version == "default"
        assert await client.get_policy_version() == 6


async def test_bad_weights_disturb_nobody(client: VLLMChatClient, fakes: Fakes) -> None:
    publisher = BroadcastPolicyPublisher(client)
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({}, "no weights"),
        ({"a": torch.tensor([1.0, float("inf")])}, "NaN or infinity, first a"),
        ({"a": torch.tensor([float("nan")], dtype=torch.bfloat16)}, "NaN or infinity"),
    ]
    for weights, says in wrong:
        with pytest.raises(PublishError, match=says):
            await publisher.publish(weights, 1)
    with pytest.raises(PublishError, match="is on cpu"):
        await BroadcastPolicyPublisher(client, plane=IPCPlane()).publish(WEIGHTS, 1)
    assert all(f.calls["/pause"] == 0 for f in fakes)


async def test_a_canary_out_of_budget_fails_the_publish(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    tokens = canary_tokens(tiny_model())

    def scores(_: Any) -> Any:
        rows = [None, *({str(t): {"logprob": -30.0}} for t in tokens[1:])]
        choice = {"token_ids": [1], "finish_reason": "length"}
        return {"choices": [choice], "prompt_logprobs": rows}

    for fake in fakes:
        fake.faults["/inference/v1/generate"] = scores
    weights = ModelWeights(tiny_model())
    with pytest.raises(PublishError, match="the canary differ by") as caught:
        await BroadcastPolicyPublisher(client).publish(weights, 1)
    assert all(fake.url in str(caught.value) for fake in fakes)
    assert client.in_rotation() == []
    generous = MismatchBudget(100.0, 100.0)
    report = await BroadcastPolicyPublisher(client, budget=generous).publish(weights, 2)
    assert report.details["canary_mean"] > 1


def test_a_plane_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown data plane 'pigeon'"):
        BroadcastPolicyPublisher(VLLMChatClient("http://a"), plane="pigeon")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'nccl' or 'gloo'"):
        BroadcastPlane(backend="mpi")


def test_shared_memory_is_private_and_only_our_files_are_opened() -> None:
    path, folder = write_shared(WEIGHTS)
    try:
        assert path.parent == folder.path
        assert folder.path.stat().st_mode & 0o077 == 0
        found = dict(open_shared(path))
        assert all(torch.equal(found[n], t) for n, t in WEIGHTS.items())
    finally:
        folder.close()
    for other in (path.with_name("other.safetensors"), folder.path / "x" / path.name):
        with pytest.raises(ValueError, match="is not a file of weights"):
            dict(open_shared(other))


def test_a_shipment_over_shared_memory_leaves_no_file() -> None:
    shipment = SharedMemoryPlane().prepare(WEIGHTS)
    shipment.close()
    assert not list(shared_folder().glob(f"ludic-publish-{os.getpid()}-*"))


def test_a_broadcast_over_gloo_ranks_brings_the_same_bits() -> None:
    plane = BroadcastPlane(backend="gloo")
    invitation = plane.invitation(2, 30.0)
    assert invitation is not None
    received: dict[int, dict[str, Tensor]] = {}

    def worker(rank: int) -> None:
        group = BroadcastGroup(
            invitation["host"],
            invitation["port"],
            rank=rank,
            world_size=invitation["world_size"],
            backend="gloo",
            timeout_s=30,
        )
        found = {}
        for meta in shipment.update["tensors"]:
            tensor = torch.empty(meta["shape"], dtype=getattr(torch, meta["dtype"]))
            group.broadcast(tensor)
            found[meta["name"]] = tensor
        received[rank] = found

    shipment = plane.prepare({**WEIGHTS, "c": torch.arange(6).to(torch.bfloat16)})
    threads = [threading.Thread(target=worker, args=(rank,), daemon=True) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    plane.join()
    assert shipment.move is not None
    shipment.move()
    for thread in threads:
        thread.join(timeout=30)
    for rank in (1, 2):
        assert all(torch.equal(received[rank][n], t) for n, t in WEIGHTS.items())
    assert plane.invitation(2, 30.0) is None
    assert plane.invitation(3, 30.0) is not None


def test_ranks_that_never_meet_say_so_in_time() -> None:
    with pytest.raises(DeadlineError, match="2 ranks to meet"):
        BroadcastGroup(
            "127.0.0.1", free_port(), rank=0, world_size=2, backend="gloo", timeout_s=1.0
        )


def test_a_thousand_merges_of_an_adapter_change_neither_policy_nor_result() -> None:
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(
        tiny_model(layers=1, hidden_size=32), LoraConfig(r=2, target_modules=["q_proj"])
    )
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    before = {n: p.clone() for n, p in policy.named_parameters()}
    first = {n: t.clone() for n, t in ModelWeights(policy)}
    for _ in range(998):
        for _name, _tensor in ModelWeights(policy):
            pass
    last = dict(ModelWeights(policy))
    assert all(torch.equal(last[n], t) for n, t in first.items())
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())
