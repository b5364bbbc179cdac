"""Two real servers, one of which is killed half-way through an update. Last in order, since it ends
a server that others share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import chain

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
    largest_gap,
    request,
    scored,
    tell,
    trace_of,
    until_in_flight,
)
from tests.inference.vllm.conftest import NAME, server_model, start

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


async def test_a_worker_that_is_killed_half_way_costs_no_request_and_comes_back_by_a_publish(
    pair: VLLMChatClient, two_servers: Servers
) -> None:
    survivor, victim = two_servers
    healthy, dying = pair.replicas
    models = {5: server_model(), 6: server_model(seed=9), 7: server_model(seed=5)}
    publisher = BroadcastPolicyPublisher(pair, **PATIENT)
    await publisher.publish(ModelWeights(models[5]), 5)

    # Half of the new weights are in its model when its worker is killed, as by kill -9. Both
    # servers have requests until then, however quick they are.
    published = asyncio.Event()

    async def ask(seed: int) -> list[TokenTrace]:
        traces: list[TokenTrace] = []
        while not published.is_set():
            asked = request(max_tokens=480, seed=seed + 12 * len(traces), endless=True)
            traces.append(trace_of(await pair.complete_tokens(asked)))
        return traces

    tasks = [asyncio.create_task(ask(n)) for n in range(12)]
    await until_in_flight(dying, 6)
    await tell(pair, dying, "fail_next_load", 12, True)
    report = await publisher.publish(ModelWeights(models[6]), 6)
    published.set()
    assert report.details["servers"] == [survivor.url]
    assert "failed while it applied version 6" in report.details["lost"][victim.url]
    assert pair.in_rotation() == [healthy]
    # The requests that it had are asked again elsewhere, and no token is of half an update.
    traces = list(chain.from_iterable(await asyncio.gather(*tasks)))
    assert all(len(t.completion_token_ids) == 480 for t in traces)
    assert pair.retries > 0
    for trace in traces:
        assert trace.completion_logprobs is not None
        for span in trace.version_spans:
            exact = scored(models[span.version], trace)[span.start : span.end]
            assert largest_gap(exact, trace.completion_logprobs[span.start : span.end]) <= 1e-3

    # A publish goes on without it, and says so.
    report = await publisher.publish(ModelWeights(models[7]), 7)
    assert report.details["servers"] == [survivor.url]
    assert list(report.details["lost"]) == [victim.url]

    # Started again it has its first weights: it serves nobody until a publish.
    await asyncio.to_thread(_restart, victim)
    await asyncio.gather(*(pair.complete_tokens(request(seed=n)) for n in range(4)))
    served = dying.served
    assert dying.out is not None
    report = await publisher.publish(ModelWeights(models[6]), 8)
    assert len(report.details["servers"]) == 2, report.details["lost"]
    await asyncio.gather(*(pair.complete_tokens(request(seed=n)) for n in range(8)))
    assert dying.served > served
    await assert_serves(pair, dying, models[6], 8)


async def test_a_server_whose_layers_cannot_be_put_together_says_that_it_must_be_restarted(
    pair: VLLMChatClient,
) -> None:
    healthy, failing = pair.replicas
    publisher = BroadcastPolicyPublisher(pair, **PATIENT)
    await publisher.publish(ModelWeights(server_model()), 1)
    await tell(pair, failing, "fail_next_reload")
    newer = server_model(seed=9)
    report = await publisher.publish(ModelWeights(newer), 2)
    assert "made to fail in the end" in report.details["lost"][failing.url]
    # It refuses from now on, and does not keep the other from being updated.
    newest = server_model(seed=5)
    report = await publisher.publish(ModelWeights(newest), 3)
    assert report.details["servers"] == [healthy.url]
    assert "this server must be restarted" in report.details["lost"][failing.url]
    await assert_serves(pair, healthy, newest, 3)


async def test_without_any_server_everything_says_so(two_servers: Servers) -> None:
    _, victim = two_servers
    victim.kill()
    client = VLLMChatClient(victim.url, model=NAME, max_retries=2, timeout_s=20)
    with pytest.raises(InferenceError, match="no server could serve the request"):
        await client.complete_tokens(request())
    with pytest.raises(PublishError, match=f"no server is left for version 1: {victim.url}"):
        await BroadcastPolicyPublisher(client).publish(ModelWeights(server_model()), 1)
    await client.close()


def _restart(server: VLLMServer) -> None:
    server.kill()  # what is left of it
    start(server)
    server.wait_until_healthy()
