"""Servers that go dark, lose a connection or are restarted, and publishes to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from aiohttp import web

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.vllm.canary import MismatchBudget
from ludic.errors import ConfigError, DeadlineError, InferenceError, PublishError
from ludic.inference.http import UnreachableError
from ludic.inference.retries import Backoff
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.flags import RECEIPT, STAGE
from ludic.sharding.weights import ModelWeights
from tests.inference.vllm.asking import request, trace_of
from tests.inference.vllm.fake_server import (
    ROUTES,
    FakeVLLM,
    Handler,
    blinking,
    dark_address,
    failing,
    hanging,
    vanishing,
)

pytestmark = pytest.mark.usefixtures("clock")

WEIGHTS = {"a.weight": torch.ones(3)}
QUICK = Backoff(first_s=0.001, longest_s=0.01)
GENERATE, COMPLETIONS, RPC = "/inference/v1/generate", "/v1/completions", "/collective_rpc"
Fakes = tuple[FakeVLLM, FakeVLLM]


@pytest.fixture
def dark() -> Iterator[str]:
    with dark_address() as found:
        yield found


@pytest.fixture
async def fakes() -> AsyncIterator[Fakes]:
    async with FakeVLLM().serving() as first, FakeVLLM().serving() as second:
        yield first, second


@pytest.fixture
async def client(fakes: Fakes) -> AsyncIterator[VLLMChatClient]:
    urls = [f.url for f in fakes]
    async with VLLMChatClient(urls, backoff=QUICK, connect_timeout_s=0.2) as found:
        yield found


@pytest.fixture
async def older() -> AsyncIterator[tuple[FakeVLLM, VLLMChatClient]]:
    """A server that keeps no versions, as vLLM 0.26."""
    async with AsyncExitStack() as stack:
        fake = FakeVLLM(routes=tuple(r for r in ROUTES if r != "/weight_info"))
        await stack.enter_async_context(fake.serving())
        client = VLLMChatClient(fake.url, backoff=QUICK)
        yield fake, await stack.enter_async_context(client)


def versions_of(response: Any) -> list[int]:
    return [span.version for span in trace_of(response).version_spans]


# A host that goes dark


async def test_requests_to_a_host_that_went_dark_are_served_by_the_other(
    client: VLLMChatClient, dark: str
) -> None:
    client.replicas[1].url = dark
    asked = [client.complete_tokens(request(seed=n, timeout_s=20)) for n in range(8)]
    assert len(await asyncio.gather(*asked)) == 8
    assert client.in_rotation() == [client.replicas[0]]
    assert "ConnectionTimeoutError" in client.replicas[1].describe()


async def test_no_connection_is_told_apart_from_a_deadline(
    client: VLLMChatClient, fakes: Fakes, dark: str
) -> None:
    client.replicas[1].url = dark
    with pytest.raises(UnreachableError, match=f"{dark}/health did not answer"):
        await client.control(client.replicas[1], "GET", "/health", timeout_s=30)
    with pytest.raises(DeadlineError, match=r"waited 0.05 s .*/health"):
        await client.control(client.replicas[1], "GET", "/health", timeout_s=0.05)


async def test_a_host_that_goes_dark_in_a_publish_is_dropped_from_it(
    client: VLLMChatClient, fakes: Fakes, dark: str
) -> None:
    def goes_dark(_: Any) -> None:
        client.replicas[1].url = dark

    fakes[1].faults["/collective_rpc"] = goes_dark
    report = await BroadcastPolicyPublisher(client).publish(WEIGHTS, 1)
    assert report.details["servers"] == [fakes[0].url]
    assert "it went away when it was to take the tensors" in report.details["lost"][dark]
    assert fakes[0].version == "1"


def test_a_connection_needs_some_time() -> None:
    with pytest.raises(ConfigError, match="connect_timeout_s=0"):
        VLLMChatClient("http://127.0.0.1:8000", connect_timeout_s=0)


@dataclass
class ClosingIdle(FakeVLLM):
    """Closes the connections that it had when `closing` was set, each at the moment when the next
    request is sent over it: what a server does to those that have been silent for a while."""

    closing: bool = False
    known: set[Any] = field(default_factory=set)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self.closing:
            self.known.add(request.transport)
        elif request.transport in self.known:
            vanishing(request)
        return await super().answer(request)


async def test_a_publish_takes_no_connection_that_the_server_may_be_closing() -> None:
    weights = ModelWeights(tiny_model())  # first: pooled connections do not live long
    async with (
        ClosingIdle().serving() as first,
        ClosingIdle().serving() as second,
        VLLMChatClient([first.url, second.url], backoff=QUICK) as client,
    ):
        await asyncio.gather(*(client.complete_tokens(request(seed=n)) for n in range(4)))
        prompt = (1, 2, 3)
        for fake in (first, second):
            fake.closing = True
            fake.faults[GENERATE] = scoring(prompt)
        budget = MismatchBudget(100.0, 100.0)
        publisher = BroadcastPolicyPublisher(client, canary_prompt=prompt, budget=budget)
        report = await publisher.publish(weights, 1)
        assert report.details["lost"] == {}
        assert "canary_max" in report.details


def scoring(prompt: tuple[int, ...]) -> Handler:
    """Gives every token of the prompt the same score."""
    rows = [None, *({str(t): {"logprob": -1.0}} for t in prompt[1:])]
    choice = {"token_ids": [1], "finish_reason": "length"}
    return lambda _: {"choices": [choice], "prompt_logprobs": rows}


@pytest.mark.parametrize(("patience_s", "back"), [(None, False), (300.0, True)])
async def test_a_slow_server_out_of_rotation_comes_back_where_the_publisher_has_the_patience(
    client: VLLMChatClient, fakes: Fakes, patience_s: float | None, back: bool
) -> None:
    async def slow(_: Any) -> None:
        await asyncio.sleep(60)

    client.replicas[1].out = "it was restarted"
    fakes[1].faults |= dict.fromkeys(("/v1/models", STAGE), slow)
    publisher = BroadcastPolicyPublisher(client, timeout_s=900, patience_s=patience_s)
    report = await publisher.publish(WEIGHTS, 1)
    assert list(report.details["lost"]) == ([] if back else [fakes[1].url])
    assert fakes[0].version == "1"
    assert fakes[1].version == ("1" if back else "default")


# A server that keeps no versions


async def test_a_server_that_keeps_no_versions_survives_a_lost_connection(
    older: tuple[FakeVLLM, VLLMChatClient],
) -> None:
    fake, client = older
    await BroadcastPolicyPublisher(client).publish(WEIGHTS, 1)
    fake.faults[COMPLETIONS] = blinking()
    assert versions_of(await client.complete_tokens(request())) == [1]
    assert client.retries == 1
    assert client.in_rotation() == list(client.replicas)


@pytest.mark.parametrize("receipts", [None, failing(500), failing(404)])
async def test_a_server_that_keeps_no_versions_and_was_restarted_stays_out(
    older: tuple[FakeVLLM, VLLMChatClient], receipts: Handler | None
) -> None:
    fake, client = older
    publisher = BroadcastPolicyPublisher(client)
    await publisher.publish(WEIGHTS, 1)
    fake.applied = 0  # restarted
    fake.faults[COMPLETIONS] = blinking()
    if receipts is not None:  # without Ludic's side
        fake.faults[RPC] = receipts
    with pytest.raises(InferenceError, match="version 0 instead of version 1; the next publish"):
        await client.complete_tokens(request())
    fake.faults.clear()
    await publisher.publish(WEIGHTS, 2)
    assert versions_of(await client.complete_tokens(request())) == [2]


async def test_a_restarted_server_has_the_first_version_still_where_nothing_was_published(
    older: tuple[FakeVLLM, VLLMChatClient],
) -> None:
    fake, client = older
    fake.faults[COMPLETIONS] = blinking()
    assert versions_of(await client.complete_tokens(request())) == [0]
    assert fake.calls[RPC] == 0


# In the middle of a publish, and two at once


@pytest.mark.parametrize("names_versions", [True, False])
async def test_a_lost_connection_after_its_own_apply_costs_a_server_nothing(
    names_versions: bool,
) -> None:
    routes = tuple(r for r in ROUTES if names_versions or r != "/weight_info")
    async with (
        FakeVLLM(routes=routes).serving() as first,
        FakeVLLM(routes=routes).serving() as second,
        VLLMChatClient([first.url, second.url], backoff=QUICK) as client,
    ):
        publisher = BroadcastPolicyPublisher(client)
        await publisher.publish(WEIGHTS, 1)
        go_on = asyncio.Event()

        async def waiting(_: Any) -> None:
            await go_on.wait()

        second.faults["/finish_weight_update"] = waiting
        publishing = asyncio.create_task(publisher.publish(WEIGHTS, 2))
        async with asyncio.timeout(20):
            while client.replicas[0].version != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        client.replicas[0].mark_down("it lost a connection", 0.0)
        async with asyncio.timeout(20):
            while client.replicas[0].lost:
                await client.complete_tokens(request())
        go_on.set()
        report = await publishing
        assert report.details["lost"] == {}
        assert client.in_rotation() == list(client.replicas)


async def test_what_a_server_said_before_a_publish_reached_it_does_not_count_after_it(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def late(_: Any) -> Any:
        said = {"weight_version": fakes[1].version}
        del fakes[1].faults["/weight_info"]
        asked.set()
        await go_on.wait()
        return said

    fakes[1].faults["/weight_info"] = late
    client.replicas[1].mark_down("it was restarted", 0.0)
    async with asyncio.timeout(60):
        while not asked.is_set():  # the other serves, and this one is asked meanwhile
            await client.complete_tokens(request())
    report = await BroadcastPolicyPublisher(client).publish(WEIGHTS, 1)
    assert len(report.details["servers"]) == 2
    go_on.set()
    await asyncio.gather(*client._learning.values())
    assert client.in_rotation() == list(client.replicas)


async def test_of_two_publishes_at_once_the_older_version_is_refused(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    publisher = BroadcastPolicyPublisher(client)
    newer, older = await asyncio.gather(
        publisher.publish(WEIGHTS, 6), publisher.publish(WEIGHTS, 5), return_exceptions=True
    )
    assert not isinstance(newer, BaseException)
    assert isinstance(older, PublishError)
    assert "version 5 is older than 6" in str(older)
    assert publisher.version == 6
    assert [f.version for f in fakes] == ["6", "6"]


async def test_a_known_server_that_hangs_is_lost_and_the_other_updated(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    publisher = BroadcastPolicyPublisher(client)
    await publisher.publish(WEIGHTS, 1)
    fakes[1].faults |= dict.fromkeys((*ROUTES, STAGE), hanging)
    report = await publisher.publish(WEIGHTS, 2)
    assert "went away when it was to take the tensors" in report.details["lost"][fakes[1].url]
    assert (fakes[0].version, fakes[1].version) == ("2", "1")


async def test_what_a_lost_server_had_staged_is_dropped_before_anybody_computes_with_it(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    async def computes(request: web.Request) -> None:
        if (await request.json())["method"] == RECEIPT and fakes[1].staged:
            await asyncio.sleep(60)

    fakes[1].faults[RPC] = computes
    client.replicas[1].out = "it went away when it was to take the tensors"
    fakes[1].staged = {"a.weight": ["of", "another", "publish"]}
    report = await BroadcastPolicyPublisher(client).publish(WEIGHTS, 1)
    assert report.details["lost"] == {}
    assert [fake.version for fake in fakes] == ["1", "1"]
