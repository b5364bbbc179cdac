"""Servers that are killed in the middle of a publish, and answer for a moment longer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from ludic.distributed.interfaces import Snapshot
from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.vllm.canary import MismatchBudget
from ludic.distributed.vllm.delivery import ServersAwayError
from ludic.distributed.vllm.planes import SharedMemoryPlane
from ludic.errors import PublishError
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.flags import STAGE
from ludic.inference.vllm.switching import CANARY, SWITCH
from ludic.sharding.weights import ModelWeights
from tests.distributed.test_servers_away import WEIGHTS, scoring
from tests.inference.vllm.fake_server import ROUTES, FakeVLLM, hanging, vanishing

pytestmark = pytest.mark.usefixtures("clock")

GENERATE = "/inference/v1/generate"
JOIN = "/init_weight_transfer_engine"
STAGES = (
    *(JOIN, "/collective_rpc", "/pause"),
    *("/finish_weight_update", "/reset_prefix_cache", "/resume", SWITCH, CANARY, GENERATE),
)
PROMPT = (1, 2, 3)


@dataclass
class Dying(FakeVLLM):
    """From the first time that it is asked for `path`, answers with HTTP 500, as vLLM does while it
    ends; or `hangs`, as it does without an engine. It calls itself healthy so many times more, and
    is gone then."""

    path: str = ""
    healthy: int = 0
    hangs: bool = False
    dies: bool = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == self.path and (request.method, self.path) != ("GET", SWITCH):
            self.dies = True
            if self.hangs:
                await hanging(request)
        if not self.dies:
            return await super().answer(request)
        asks_health = request.path == "/health"
        self.healthy -= asks_health
        if self.healthy < 0:
            return vanishing(request)  # type: ignore[no-any-return]
        answer = {"error": {"message": "cannot schedule new futures after shutdown"}}
        return web.json_response(answer, status=200 if asks_health else 500)

    def start_again(self) -> None:
        """As it was at first, with the weights that it was started with."""
        self.path, self.dies, self.paused, self.version = "", False, False, "default"


class InvitingPlane(SharedMemoryPlane):
    """Has servers join, as broadcasts do."""

    def invitation(self, workers: int, timeout_s: float) -> Mapping[str, Any]:
        return {"workers": workers}


class Starts:
    """What waits for servers when a publish begins: starts one again that has died."""

    def __init__(self, fake: Dying, client: VLLMChatClient) -> None:
        self.count, self._fake, self._client = 0, fake, client

    async def __call__(self) -> None:
        self.count += 1
        if self._fake.dies:
            assert self._client.in_rotation() == []  # nobody samples from what it may have
            self._fake.start_again()


@pytest.fixture(params=STAGES)
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[Dying]:
    fake = Dying((*ROUTES, JOIN), path=request.param, faults={GENERATE: scoring(PROMPT)})

    async def switch(asked: web.Request) -> Any:
        if asked.method == "POST":
            fake._control("/finish_weight_update", await asked.json())
        return {"stall_s": 0.1, "seconds": {}}

    if request.param in (SWITCH, CANARY):
        fake.faults |= {SWITCH: switch, CANARY: lambda _: {"scores": None}}
    async with fake.serving():
        yield fake


@pytest.fixture
async def client(fake: Dying) -> AsyncIterator[VLLMChatClient]:
    path, fake.path = fake.path, ""
    async with VLLMChatClient(fake.url) as client:
        fake.path = path
        yield client


async def publish(client: VLLMChatClient, starts: Starts | None) -> Any:
    publisher = BroadcastPolicyPublisher(
        client,
        plane=InvitingPlane(),
        canary_prompt=PROMPT,
        budget=MismatchBudget(100.0, 100.0),
    )
    publisher.before = starts
    weights = ModelWeights(tiny_model())
    await publisher.read_model(weights, 3)
    return await publisher.publish(Snapshot(dict(weights), weights.model), 3)


@pytest.mark.parametrize(("healthy", "hangs"), [(0, False), (3, False), (0, True)])
async def test_a_server_that_dies_in_a_publish_is_waited_for_and_gets_all_weights(
    fake: Dying, client: VLLMChatClient, healthy: int, hangs: bool
) -> None:
    fake.healthy, fake.hangs = healthy, hangs
    starts = Starts(fake, client)
    report = await publish(client, starts)
    assert starts.count == 2
    assert (report.details["lost"], report.details["sent"]) == ({}, "weights")
    assert (fake.version, fake.paused) == ("3", False)
    assert client.in_rotation() == list(client.replicas)


async def test_a_dying_server_that_nobody_starts_again_counts_as_away(
    fake: Dying, client: VLLMChatClient
) -> None:
    with pytest.raises(ServersAwayError, match=fake.url):
        await publish(client, None)
    assert client.in_rotation() == []


async def test_an_error_of_a_server_that_lives_on_fails_the_publish_and_names_it(
    fake: Dying, client: VLLMChatClient
) -> None:
    fake.healthy = 10**9
    starts = Starts(fake, client)
    with pytest.raises(PublishError, match=fake.url) as caught:
        await publish(client, starts)
    assert not isinstance(caught.value, ServersAwayError)
    assert starts.count == 1


async def test_a_known_server_that_has_gone_is_not_invited_and_the_other_is_updated() -> None:
    routes = (*ROUTES, JOIN)
    async with FakeVLLM(routes).serving() as alive, FakeVLLM(routes).serving() as gone:
        async with VLLMChatClient([alive.url, gone.url]) as client:
            publisher = BroadcastPolicyPublisher(client, plane=InvitingPlane())
            await publisher.publish(WEIGHTS, 1)
            gone.faults |= dict.fromkeys((*routes, STAGE), vanishing)
            report = await publisher.publish(WEIGHTS, 2)
        assert "did not answer when a publish began" in report.details["lost"][gone.url]
        assert (alive.version, gone.version) == ("2", "1")
