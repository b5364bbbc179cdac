"""Real servers that fail while they apply an update: the worst moment, since by then the old
weights are gone. Also how such a server comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.errors import InferenceError, PublishError
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import VLLMServer
from ludic.sharding.weights import ModelWeights
from ludic.types import TokenTrace
from tests.inference.vllm.asking import (
    PATIENT,
    assert_serves,
    request,
    tell,
    trace_of,
    until_in_flight,
)
from tests.inference.vllm.conftest import NAME, server_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]


@pytest.fixture
async def pair(two_servers: tuple[VLLMServer, VLLMServer]) -> AsyncIterator[VLLMChatClient]:
    async with VLLMChatClient([server.url for server in two_servers], model=NAME) as found:
        yield found


@pytest.mark.parametrize("after", [0, 15])
async def test_a_server_that_fails_half_way_is_out_its_requests_move_and_a_publish_mends_it(
    pair: VLLMChatClient, after: int
) -> None:
    healthy, failing = pair.replicas
    publisher = BroadcastPolicyPublisher(pair, **PATIENT)
    assert len((await publisher.publish(ModelWeights(server_model()), 1)).details["servers"]) == 2
    await tell(pair, failing, "fail_next_load", after)
    published = asyncio.Event()

    async def ask_on_and_on(n: int) -> list[TokenTrace]:
        traces: list[TokenTrace] = []
        while not published.is_set() or not traces:
            asked = request(range(30 + n, 50 + n), max_tokens=200, seed=len(traces), endless=True)
            traces.append(trace_of(await pair.complete_tokens(asked)))
        return traces

    tasks = [asyncio.create_task(ask_on_and_on(n)) for n in range(8)]
    await until_in_flight(failing, 4)

    newer = server_model(seed=9)
    report = await publisher.publish(ModelWeights(newer), 2)
    published.set()
    assert report.details["servers"] == [healthy.url]
    why = report.details["lost"][failing.url]
    assert "failed while it applied version 2" in why
    assert "made to fail half-way" in why
    assert pair.in_rotation() == [healthy]

    # Those that were frozen there are asked again elsewhere, and none is lost.
    traces = [trace for task in tasks for trace in await task]
    assert all(len(trace.completion_token_ids) == 200 for trace in traces)
    assert pair.retries > 0
    assert failing.in_flight == 0
    served = failing.served
    await asyncio.gather(*(pair.complete_tokens(request(seed=n)) for n in range(4)))
    assert failing.served == served
    await assert_serves(pair, healthy, newer, 2)

    # All weights are written anew, whatever the failed update left of them.
    newest = server_model(seed=5)
    report = await publisher.publish(ModelWeights(newest), 3)
    assert set(report.details["servers"]) == {healthy.url, failing.url}
    for replica in pair.replicas:
        await assert_serves(pair, replica, newest, 3)


async def test_when_the_only_server_fails_the_trainer_gets_an_error_that_names_it(
    two_servers: tuple[VLLMServer, VLLMServer],
) -> None:
    url = two_servers[1].url
    async with VLLMChatClient(url, model=NAME, max_retries=2) as client:
        replica = client.replicas[0]
        publisher = BroadcastPolicyPublisher(client, **PATIENT)
        model = server_model()
        await publisher.publish(ModelWeights(model), 1)
        await tell(client, replica, "fail_next_load", 4)

        async def ask_on_and_on() -> None:
            while True:
                await client.complete_tokens(request(max_tokens=200, endless=True))

        running = asyncio.create_task(ask_on_and_on())
        await until_in_flight(replica, 1)
        with pytest.raises(PublishError, match="no server is left for version 2") as caught:
            await publisher.publish(ModelWeights(server_model(seed=9)), 2)
        assert url in str(caught.value)
        assert "made to fail half-way" in str(caught.value)
        # Nobody waits for ever: there is no other server, so the request ends with an error.
        with pytest.raises(InferenceError, match="out of rotation"):
            await running
        await publisher.publish(ModelWeights(model), 3)
        await assert_serves(client, replica, model, 3)


async def test_a_real_model_would_be_written_in_place_on_a_gpu(pair: VLLMChatClient) -> None:
    _, failing = pair.replicas
    answer = await tell(pair, failing, "judge")
    assert answer["results"] == [{"on a GPU": None, "here": "the device is cpu"}]
    publisher = BroadcastPolicyPublisher(pair, **PATIENT)
    await publisher.publish(ModelWeights(server_model()), 1)
    await assert_serves(pair, failing, server_model(), 1)
