"""The route with which a server goes over to staged weights: as ASGI, and as publishers use it."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.vllm.canary import MismatchBudget
from ludic.errors import DeadlineError
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.flags import STAGE
from ludic.inference.vllm.switching import CANARY, SWITCH, SwitchRoute
from ludic.sharding.weights import ModelWeights
from tests.distributed.test_publish_stages import WEIGHTS
from tests.inference.vllm.fake_server import FakeVLLM, failing
from tests.virtual_time import virtual_time


class Engine:
    """Notes what is asked of it; `fails` is the step that does."""

    def __init__(self, fails: str = "") -> None:
        self.steps: list[Any] = []
        self.fails = fails
        self.renderer = self.engine_core = self

    async def clear_mm_cache_async(self) -> None:
        self.steps.append("clear")

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.steps.append(("pause", mode, clear_cache))

    async def finish_weight_update(self, *version: str) -> None:
        if self.fails == "finish":
            raise RuntimeError("it does not fit")
        self.steps.append(("finish", *version))

    async def resume_generation(self) -> None:
        self.steps.append("resume")

    async def add_request(self, name: str, prompt: Any, params: Any, *, priority: int) -> Any:
        if self.fails == "canary":
            raise ValueError("the prompt is too long")
        self.steps.append(("canary", prompt["prompt_token_ids"], params, priority))
        rows = [None, {5: SimpleNamespace(logprob=-0.5)}, {6: SimpleNamespace(logprob=-1.5)}]
        outputs = asyncio.Queue[Any]()
        if self.fails == "scores":
            return outputs
        outputs.put_nowait(SimpleNamespace(finished=False, prompt_logprobs=None))
        outputs.put_nowait(SimpleNamespace(finished=True, prompt_logprobs=rows))
        return outputs


async def asked(
    engine: Engine,
    method: str,
    body: bytes = b"",
    path: str = SWITCH,
    route: SwitchRoute | None = None,
) -> Any:
    """Status and body of the answer; the path where it was passed on."""
    sent: list[Any] = []

    class State:
        engine_client = engine

    class App:
        state = State

    async def passed(scope: Any, receive: Any, send: Any) -> None:
        sent.append(scope["path"])

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": method, "app": App}
    await (route or SwitchRoute(passed))(scope, receive, send)
    if len(sent) == 1:
        return sent[0]
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_one_exchange_pauses_applies_and_resumes() -> None:
    engine = Engine()
    status, answer = await asked(engine, "POST", b'{"weight_version": "7"}')
    assert engine.steps == ["clear", ("pause", "keep", True), ("finish", "7"), "resume"]
    assert status == 200
    assert set(answer["seconds"]) == {"pause", "apply", "resume"}
    assert answer["stall_s"] >= sum(answer["seconds"].values())


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sampling parameters, as the server's environment has them."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))


async def never(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError(scope["path"])


@pytest.mark.usefixtures("sampling")
async def test_a_canary_waits_in_the_engine_when_sampling_goes_on_and_is_scored() -> None:
    engine, route = Engine(), SwitchRoute(never)
    assert await asked(engine, "GET", path=CANARY, route=route) == (200, {"scores": None})
    status, _ = await asked(engine, "POST", b'{"canary": [4, 5, 6]}', route=route)
    params = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    assert (status, engine.steps[-2:]) == (200, [("canary", [4, 5, 6], params, -1), "resume"])
    answer = await asked(engine, "GET", path=CANARY, route=route)
    assert answer == (200, {"scores": [-0.5, -1.5]})
    await asked(engine, "POST", route=route)
    assert await asked(engine, "GET", path=CANARY, route=route) == (200, {"scores": None})


@pytest.mark.usefixtures("sampling")
async def test_a_server_that_refuses_the_canary_serves_on_and_says_that_it_has_no_scores() -> None:
    engine, route = Engine(fails="canary"), SwitchRoute(never)
    status, _ = await asked(engine, "POST", b'{"canary": [4, 5, 6]}', route=route)
    assert (status, engine.steps[-1]) == (200, "resume")
    assert await asked(engine, "GET", path=CANARY, route=route) == (200, {"scores": None})


@pytest.mark.usefixtures("sampling")
async def test_a_canary_that_is_never_scored_is_given_up_with_the_publish() -> None:
    engine, route = Engine(fails="scores"), SwitchRoute(never)
    with virtual_time():
        await asked(engine, "POST", b'{"canary": [4, 5, 6], "timeout_s": 30}', route=route)
        given_up = asyncio.create_task(asked(engine, "GET", path=CANARY, route=route))
        await asyncio.sleep(1)
        given_up.cancel()
        answer = await asked(engine, "GET", path=CANARY, route=route)
    assert answer == (200, {"scores": None}), "and one who gave up took nothing away"


async def test_a_server_without_versions_is_told_none() -> None:
    engine = Engine()
    await asked(engine, "POST")
    assert ("finish",) in engine.steps


async def test_a_server_that_could_not_apply_stays_paused_and_says_why() -> None:
    engine = Engine(fails="finish")
    status, answer = await asked(engine, "POST")
    assert status == 500
    assert "it does not fit" in answer["error"]["message"]
    assert "resume" not in engine.steps


async def test_asking_whether_the_route_is_there_changes_nothing() -> None:
    engine = Engine()
    assert await asked(engine, "GET") == (200, {})
    assert await asked(engine, "POST", path="/pause") == "/pause"
    assert engine.steps == []


async def test_a_publish_stages_in_one_exchange_and_switches_in_another() -> None:
    async with FakeVLLM().serving() as fake:

        async def switch(request: web.Request) -> Any:
            if request.method == "POST":
                fake._control("/finish_weight_update", await request.json())
            return {"stall_s": 0.25, "seconds": {"pause": 0.1, "apply": 0.1, "resume": 0.05}}

        fake.faults[SWITCH] = switch
        async with VLLMChatClient(fake.url) as client:
            publisher = BroadcastPolicyPublisher(client)
            report = await publisher.publish(WEIGHTS, 3)
            assert (fake.version, fake.applied, fake.calls["/pause"]) == ("3", 1, 0)
            fake.order.clear()
            await publisher.publish(WEIGHTS, 4)
        assert fake.order == [STAGE, SWITCH], "and a server that is known is asked nothing else"
        assert report.details["stall_s"] == 0.25
        assert report.details["stages"]["apply"] == 0.1


async def test_a_server_that_fails_to_switch_is_out_of_rotation_and_the_others_serve_on() -> None:
    async with FakeVLLM().serving() as good, FakeVLLM().serving() as bad:
        posts = failing(500)
        bad.faults[SWITCH] = lambda r: posts(r) if r.method == "POST" else {}
        async with VLLMChatClient([good.url, bad.url]) as client:
            with virtual_time():
                report = await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)
        assert list(report.details["lost"]) == [bad.url]
        assert "applied version 3" in report.details["lost"][bad.url]
        assert bad.calls["/pause"] == 1  # its requests are sent elsewhere
        assert good.version == "3"


async def test_a_server_that_hangs_in_a_switch_is_given_the_time_left_and_paused() -> None:
    async with FakeVLLM().serving() as fake:
        limits: list[float] = []

        async def switch(request: web.Request) -> Any:
            if request.method == "POST":
                limits.append((await request.json())["timeout_s"])
                await asyncio.sleep(3600)
            return {}

        async def slow(_: web.Request) -> None:
            await asyncio.sleep(8)

        fake.faults[SWITCH] = switch
        fake.faults[STAGE] = slow
        async with VLLMChatClient(fake.url) as client:
            publisher = BroadcastPolicyPublisher(client, timeout_s=20.0, patience_s=5.0)
            with (
                virtual_time(),
                pytest.raises(DeadlineError, match="the publish of version 3"),
            ):
                await publisher.publish(WEIGHTS, 3)
            assert "by the deadline" in str(client.replicas[0].out)
        assert 0 < limits[0] < 12.0
        assert fake.calls["/pause"] == 1


@pytest.mark.parametrize("scored", [True, False])
async def test_a_server_that_scored_the_canary_as_it_switched_is_not_asked_again(
    scored: bool,
) -> None:
    async with FakeVLLM().serving() as fake:
        canaries: list[Any] = []

        async def switch(request: web.Request) -> Any:
            if request.method == "POST":
                canaries.append((await request.json())["canary"])
                fake._control("/finish_weight_update", {})
            return {"stall_s": 0.0, "seconds": {}}

        async def generate(_: web.Request) -> Any:
            canaries.append("asked")
            choice = {"token_ids": [1], "finish_reason": "length"}
            return {"choices": [choice], "prompt_logprobs": [None, {"2": {"logprob": -1.0}}]}

        fake.faults[SWITCH] = switch
        fake.faults[CANARY] = lambda _: {"scores": [-1.0] if scored else None}
        async with VLLMChatClient(fake.url) as client:
            await client.connect(timeout_s=60)
            fake.faults["/inference/v1/generate"] = generate
            budget = MismatchBudget(100.0, 100.0)
            publisher = BroadcastPolicyPublisher(client, canary_prompt=(1, 2), budget=budget)
            report = await publisher.publish(ModelWeights(tiny_model()), 1)
    assert canaries == ([[1, 2]] if scored else [[1, 2], "asked"])
    assert "canary_mean" in report.details
