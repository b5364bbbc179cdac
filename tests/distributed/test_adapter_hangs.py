"""`AdapterPolicyPublisher` with a server that hangs: it is named, and the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from ludic.distributed import AdapterPolicyPublisher, ModelWeights
from ludic.distributed.vllm.canary import MismatchBudget
from ludic.errors import DeadlineError
from ludic.inference.retries import Backoff
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from tests.distributed.lora_server import LOAD, FakeLoRA
from tests.distributed.test_adapter_publisher import adapter
from tests.inference.vllm.asking import request
from tests.inference.vllm.fake_server import dark_address, hanging

pytestmark = pytest.mark.usefixtures("clock")

GENERATE, RPC = "/inference/v1/generate", "/collective_rpc"
QUICK = Backoff(first_s=0.001, longest_s=0.01)
Fakes = tuple[FakeLoRA, FakeLoRA]


@pytest.fixture
async def fakes() -> AsyncIterator[Fakes]:
    async with FakeLoRA().serving() as first, FakeLoRA().serving() as second:
        yield first, second


@pytest.fixture
async def client(fakes: Fakes) -> AsyncIterator[VLLMChatClient]:
    urls = [f.url for f in fakes]
    async with VLLMChatClient(urls, model="tiny", backoff=QUICK, connect_timeout_s=0.2) as found:
        yield found


@pytest.fixture
async def publisher(
    client: VLLMChatClient, tmp_path: Path
) -> AsyncIterator[AdapterPolicyPublisher]:
    found = AdapterPolicyPublisher(
        client, folder=tmp_path, budget=MismatchBudget(100.0, 100.0), timeout_s=2
    )
    yield found
    await found.close()


def serving(client: VLLMChatClient) -> list[int]:
    return [replica.serving.version for replica in client.replicas]


def hanging_receipt(fake: FakeLoRA) -> Any:
    """It says what it takes, but not what it has."""

    async def answer(asked: Any) -> Any:
        body = await asked.json()
        if body["method"] == "ludic_adapter_receipt":
            await hanging(asked)
        return fake._reply(RPC, body)

    return answer


async def hanging_canary(asked: Any) -> Any:
    """It says that it has the route, but does not sample."""
    if await asked.json():
        await hanging(asked)


async def test_a_server_that_hangs_when_a_publish_begins_stops_nobody(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    fakes[1].faults[RPC] = hanging
    for version in (2, 3):
        report = await publisher.publish(adapter(2.0), version)
        assert report.details["servers"] == [fakes[0].url]
        assert "did not answer when a publish began" in report.details["lost"][fakes[1].url]
    assert serving(client) == [3, 1]


@pytest.mark.parametrize("step", ["load the adapter", "say what it loaded", "sample the canary"])
async def test_a_server_that_hangs_is_named_and_the_next_publish_goes_on_without_it(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes, step: str
) -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    weights = ModelWeights(model)
    await publisher.publish(weights, 1)
    if step == "load the adapter":
        fakes[1].faults[LOAD] = hanging
    elif step == "say what it loaded":
        fakes[1].faults[RPC] = hanging_receipt(fakes[1])
    else:
        fakes[1].faults[GENERATE] = hanging_canary
    named = rf"{fakes[1].url}: out of rotation \(it was to {step}, and had not answered"
    with pytest.raises(DeadlineError, match=named):
        await publisher.publish(weights, 2)
    assert client.in_rotation() == [client.replicas[0]]
    assert serving(client) == [1, 1]
    report = await publisher.publish(weights, 3)
    assert report.details["servers"] == [fakes[0].url]
    assert list(report.details["lost"]) == [fakes[1].url]
    fakes[1].faults.clear()
    await publisher.publish(weights, 4)
    assert serving(client) == [4, 4]
    assert client.in_rotation() == list(client.replicas)


async def test_a_server_that_was_asked_only_just_before_the_deadline_stays(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    held = client.replicas[1].serving
    held.requests += 1
    await publisher.publish(adapter(2.0), 2)
    fakes[1].faults[LOAD] = hanging
    publishing = asyncio.create_task(publisher.publish(adapter(3.0), 3))
    await asyncio.sleep(1.8)
    held.requests -= 1  # room at last
    with pytest.raises(DeadlineError, match="the publish of version 3"):
        await publishing
    assert fakes[1].calls[LOAD] > 2
    assert client.in_rotation() == list(client.replicas)


async def test_nobody_waits_for_room_on_a_server_out_of_rotation(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    client.replicas[1].serving.requests += 1  # one that never ends
    await publisher.publish(adapter(2.0), 2)
    client.replicas[1].out = "it was lost"
    report = await publisher.publish(adapter(3.0), 3)
    assert report.details["servers"] == [fakes[0].url]
    assert "room for one more adapter" in report.details["lost"][fakes[1].url]
    assert "1 of version 1" in report.details["lost"][fakes[1].url]


async def test_a_server_that_hangs_when_it_is_to_come_back_does_not_hold_up_a_publish(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    fakes[1].adapters.clear()  # restarted
    fakes[1].faults[LOAD] = hanging
    client.replicas[1].mark_down("gone", 0.0)
    before = fakes[1].calls[LOAD]
    async with asyncio.timeout(20):
        while fakes[1].calls[LOAD] == before:
            await client.complete_tokens(request())
    fakes[1].faults[RPC] = hanging
    now = asyncio.get_running_loop().time
    began = now()
    report = await publisher.publish(adapter(2.0), 2)
    assert report.details["servers"] == [fakes[0].url]
    assert now() - began < 1.9


async def test_a_host_that_goes_dark_in_a_publish_is_dropped_from_it(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    with dark_address() as dark:

        def goes_dark(_: Any) -> None:
            client.replicas[1].url = dark

        fakes[1].faults["/v1/models"] = goes_dark
        report = await publisher.publish(adapter(2.0), 2)
        assert report.details["servers"] == [fakes[0].url]
        assert "went away when it was to load" in report.details["lost"][dark]
