"""Two real servers, one of which dies. Last in order, since it ends a server others share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from transformers import Qwen2ForCausalLM

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.vllm.planes import SharedMemoryPlane
from ludic.errors import InferenceError, PublishError
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import VLLMServer
from ludic.sharding.weights import ModelWeights
from tests.inference.vllm.asking import (
    PATIENT,
    largest_gap,
    request,
    scored,
    trace_of,
    until_in_flight,
)
from tests.inference.vllm.conftest import NAME, server_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

Servers = tuple[VLLMServer, VLLMServer]


@pytest.fixture
async def pair(two_servers: Servers) -> AsyncIterator[VLLMChatClient]:
    async with VLLMChatClient([s.url for s in two_servers], model=NAME) as found:
        yield found


async def test_requests_spread_and_conversations_stay(pair: VLLMChatClient) -> None:
    await asyncio.gather(*(pair.complete_tokens(request(seed=n)) for n in range(12)))
    assert all(replica.served >= 4 for replica in pair.replicas)
    homes: dict[str, set[str]] = {}
    for turn in range(3):
        for name in "abcd":
            await pair.complete_tokens(request(seed=turn, conversation=name))
            homes.setdefault(name, set()).add(pair._homes[name].url)
    assert all(len(urls) == 1 for urls in homes.values())
    assert len(Counter(next(iter(urls)) for urls in homes.values())) == 2


async def test_both_servers_get_every_version(pair: VLLMChatClient) -> None:
    newer = server_model(seed=9)
    report = await BroadcastPolicyPublisher(pair).publish(ModelWeights(newer), 4)
    assert len(report.details["servers"]) == 2
    for replica in pair.replicas:
        assert await pair.replica_version(replica) == 4
        trace = trace_of(await pair.ask_replica(replica, request()))
        assert largest_gap(scored(newer, trace), trace.completion_logprobs) <= 1e-3


class FatalPlane(SharedMemoryPlane):
    """Ends a server when it is about to receive."""

    def __init__(self, victim: VLLMServer) -> None:
        self.victim = victim

    def invitation(self, workers: int, timeout_s: float) -> Mapping[str, Any] | None:
        self.victim.kill()
        return None


async def test_a_server_that_dies_costs_no_request_and_comes_back_by_a_publish(
    pair: VLLMChatClient, two_servers: Servers
) -> None:
    survivor, victim = two_servers
    model = server_model()
    publisher = BroadcastPolicyPublisher(pair, **PATIENT)
    await publisher.publish(ModelWeights(model), 5)

    # In the middle of requests: those it had are asked again elsewhere.
    tasks = [
        asyncio.create_task(pair.complete_tokens(request(max_tokens=480, seed=n, endless=True)))
        for n in range(12)
    ]
    await until_in_flight(pair.replicas[1], 6)
    victim.kill()
    traces = [trace_of(r) for r in await asyncio.gather(*tasks)]
    assert all(len(t.completion_token_ids) == 480 for t in traces)
    assert pair.retries > 0

    # A publish goes on without it, and says so.
    newer = server_model(seed=9)
    report = await publisher.publish(ModelWeights(newer), 6)
    assert report.details["servers"] == [survivor.url]
    assert list(report.details["lost"]) == [victim.url]

    # Started again it has its first weights: it serves nobody until a publish.
    await asyncio.to_thread(_restart, victim)
    await asyncio.gather(*(pair.complete_tokens(request(seed=n)) for n in range(4)))
    served = pair.replicas[1].served
    assert pair.replicas[1].out is not None
    report = await publisher.publish(ModelWeights(newer), 7)
    assert len(report.details["servers"]) == 2, report.details["lost"]
    await asyncio.gather(*(pair.complete_tokens(request(seed=n)) for n in range(8)))
    assert pair.replicas[1].served > served

    # In the middle of an update: the other one is updated, and requests go there.
    running = [
        asyncio.create_task(pair.complete_tokens(request(max_tokens=480, seed=n, endless=True)))
        for n in range(8)
    ]
    await until_in_flight(pair.replicas[1], 4)
    fatal = BroadcastPolicyPublisher(pair, plane=FatalPlane(victim), **PATIENT)
    report = await fatal.publish(ModelWeights(model), 8)
    assert report.details["servers"] == [survivor.url]
    assert victim.url in report.details["lost"]
    assert all(len(trace_of(r).completion_token_ids) == 480 for r in await asyncio.gather(*running))
    await _serves(pair, model, 8)


async def _serves(client: VLLMChatClient, model: Qwen2ForCausalLM, version: int) -> None:
    trace = trace_of(await client.complete_tokens(request(max_tokens=8)))
    assert {s.version for s in trace.version_spans} == {version}
    assert largest_gap(scored(model, trace), trace.completion_logprobs) <= 1e-3


async def test_without_any_server_everything_says_so(two_servers: Servers) -> None:
    _, victim = two_servers
    victim.kill()
    client = VLLMChatClient(victim.url, model=NAME, max_retries=2, timeout_s=20)
    with pytest.raises(InferenceError, match="no server could serve the request"):
        await client.complete_tokens(request())
    with pytest.raises(PublishError, match="no server is left for version 1"):
        await BroadcastPolicyPublisher(client).publish(ModelWeights(server_model()), 1)
    await client.close()


def _restart(server: VLLMServer) -> None:
    server.start()
    server.wait_until_healthy()
