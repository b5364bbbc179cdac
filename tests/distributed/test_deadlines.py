"""Deadlines of publishing: each is longer than the sum of those inside it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from ludic.distributed import AdapterPolicyPublisher, BackgroundPublisher, Rank0OnlyPublisher, World
from ludic.distributed.deadlines import SLACK_S, limit_of, longest_publish_s
from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.errors import LudicError, PublishError
from ludic.inference import VLLMChatClient
from ludic.inference.vllm.flags import STAGE
from tests.inference.vllm.fake_server import FakeVLLM, hanging
from tests.training.synthetic import RecordingPublisher

pytestmark = pytest.mark.usefixtures("clock")

WEIGHTS = {"a.weight": torch.ones(3)}
STEPS = (
    *(STAGE, "/collective_rpc", "/pause"),
    *("/finish_weight_update", "/reset_prefix_cache", "/resume"),
)


@pytest.fixture
async def fake() -> AsyncIterator[FakeVLLM]:
    async with FakeVLLM().serving() as found:
        yield found


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("hangs", "timeout_s"), [*(((step,), 600.0) for step in STEPS), (STEPS, 600.0), (STEPS, 8.0)]
)
async def test_a_publish_to_a_server_that_hangs_ends_within_what_it_says(
    fake: FakeVLLM, hangs: tuple[str, ...], timeout_s: float
) -> None:
    async with VLLMChatClient(fake.url) as client:
        publisher = BroadcastPolicyPublisher(
            client, plane="shared_memory", timeout_s=timeout_s, canary=False
        )
        fake.faults |= dict.fromkeys(hangs, hanging)
        began = now()
        with pytest.raises(LudicError, match=fake.url):
            await publisher.publish(WEIGHTS, 1)
        assert now() - began <= publisher.longest_s
        assert fake.version == "default" or client.in_rotation() == []


async def test_a_publish_waits_for_a_whole_restart_and_still_has_its_own_time(
    fake: FakeVLLM,
) -> None:
    """A start of 650 s, and a transfer of 110: longer than any one of the deadlines inside."""

    async def start() -> None:
        await asyncio.sleep(650)

    async def slow(_: Any) -> None:
        await asyncio.sleep(110)

    async with VLLMChatClient(fake.url) as client:
        inner = BroadcastPolicyPublisher(client, canary=False)
        inner.before, inner.servers_s = start, 660.0
        fake.faults[STAGE] = slow
        publisher = BackgroundPublisher(inner)
        await publisher.publish(WEIGHTS, 1)
        await publisher.settle()
    assert (publisher.published, fake.version) == (1, "1")


async def test_a_server_that_never_comes_back_is_named_by_the_wait_for_it(fake: FakeVLLM) -> None:
    async with VLLMChatClient(fake.url) as client:
        inner = BroadcastPolicyPublisher(client, canary=False)
        inner.before, inner.servers_s = lambda: asyncio.sleep(math.inf), 660.0
        publisher = BackgroundPublisher(inner)
        began = now()
        await publisher.publish(WEIGHTS, 1)
        with pytest.raises(
            PublishError, match=f"waited 660 s for a server that answers from {fake.url}"
        ):
            await publisher.settle()
        assert now() - began < limit_of(inner, 0.0)


async def test_one_that_loses_its_servers_begins_again_only_while_its_time_lasts(
    fake: FakeVLLM,
) -> None:
    calls = 0

    async def start() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(300)
        client.replicas[0].out = client.replicas[0].lost = None

    async def goes_late(request: Any) -> None:
        await asyncio.sleep(100)
        request.transport.abort()

    async with VLLMChatClient(fake.url) as client:
        inner = BroadcastPolicyPublisher(client, canary=False)
        inner.before, inner.servers_s = start, 310.0
        fake.faults[STAGE] = goes_late
        publisher, began = BackgroundPublisher(inner), now()
        await publisher.publish(WEIGHTS, 1)
        with pytest.raises(PublishError, match="version 1 was not published"):
            await publisher.settle()
        assert calls == 2  # 300 s and 100, then 30 of what is left
        assert now() - began <= inner.longest_s


def test_whoever_waits_gives_a_publisher_more_than_its_own_deadlines() -> None:
    client = VLLMChatClient("http://127.0.0.1:1")
    inner = AdapterPolicyPublisher(client, timeout_s=100.0, patience_s=2.0)
    assert inner.longest_s == longest_publish_s(100.0, patience_s=2.0) == 110.0
    inner.before, inner.servers_s = lambda: asyncio.sleep(0), 50.0
    assert limit_of(inner, 1.0) == 160.0 + SLACK_S
    # What has no deadline of its own is given one: a copy in the background, an engine.
    assert limit_of(BackgroundPublisher(inner), 600.0) == 600.0
    assert limit_of(RecordingPublisher(), 600.0) == 600.0
    # Of one that gathers first, the collectives have the group's.
    assert limit_of(Rank0OnlyPublisher(inner, World()), 600.0) == math.inf
    other = World(rank=1, size=2)
    assert limit_of(Rank0OnlyPublisher(None, other), 600.0) == math.inf, "rank 0 says how it went"
    assert limit_of(Rank0OnlyPublisher(BackgroundPublisher(inner), World()), 600.0) == 600.0
