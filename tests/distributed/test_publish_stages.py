"""A publish in its stages: what happens side by side, in which order, and when one of them fails.

The servers are stand-ins; `tests/inference/vllm/` has the real ones.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.shared_folders import shared_folder
from ludic.distributed.vllm import canary, checksums, weights_payload
from ludic.distributed.vllm.canary import MismatchBudget
from ludic.distributed.vllm.delivery import PublishTimes, together
from ludic.distributed.vllm.planes import SharedMemoryPlane, Shipment
from ludic.errors import DeadlineError, PublishError
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.flags import STAGE
from ludic.sharding.weights import ModelWeights
from tests.inference.vllm.fake_server import (
    FakeVLLM,
    Handler,
    failing,
    hanging,
    receipts,
    vanishing,
)

WEIGHTS = {"a.weight": torch.arange(12.0).view(3, 4), "b.bias": torch.ones(5)}
BROKEN = {**WEIGHTS, "c.bias": torch.tensor([1.0, float("nan")])}
APPLYING = ("/finish_weight_update", "/reset_prefix_cache", "/resume")

Fakes = tuple[FakeVLLM, FakeVLLM]


@pytest.fixture
async def fakes() -> AsyncIterator[Fakes]:
    async with FakeVLLM().serving() as first, FakeVLLM().serving() as second:
        yield first, second


@pytest.fixture
async def client(fakes: Fakes) -> AsyncIterator[VLLMChatClient]:
    async with VLLMChatClient([f.url for f in fakes]) as found:
        yield found


def left_behind() -> list[Any]:
    return list(shared_folder().glob(f"ludic-publish-{os.getpid()}-*"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_server_samples_until_everything_was_compared(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)
    for fake in fakes:
        after = fake.order[fake.order.index(STAGE) :]
        assert after[:2] == [STAGE, "/pause"]
        assert set(after[2:4]) == {"/finish_weight_update", "/reset_prefix_cache"}
        assert after[4:] == ["/resume"]


async def test_the_report_says_how_long_each_stage_took(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    seconds = {"stage": 0.25, "checksums": 0.5, "apply": 4.0}  # that of the update before
    prompt = (1, 2, 3)

    def scores(_: Any) -> Any:
        rows = [None, *({str(t): {"logprob": -1.0}} for t in prompt[1:])]
        choice = {"token_ids": [1], "finish_reason": "length"}
        return {"choices": [choice], "prompt_logprobs": rows}

    fakes[0].faults[STAGE] = receipts(fakes[0], lambda said: {**said, "seconds": seconds})
    for fake in fakes:
        fake.faults["/inference/v1/generate"] = scores
    budget = MismatchBudget(100.0, 100.0)
    publisher = BroadcastPolicyPublisher(client, canary_prompt=prompt, budget=budget)
    report = await publisher.publish(ModelWeights(tiny_model()), 3)
    stages = report.details["stages"]
    assert list(stages) == [
        *("gather", "prepare", "greet", "finite", "checksums", "own_canary", "stage"),
        *("compare", "pause", "apply", "reset", "resume", "canary"),
        *("worker_stage", "worker_checksums"),
    ]
    assert all(0 <= took <= report.seconds for name, took in stages.items() if "_" not in name)
    assert (stages["worker_stage"], stages["worker_checksums"]) == (0.25, 0.5)


async def test_the_trainer_checks_its_weights_while_the_servers_stage_them(
    client: VLLMChatClient, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = threading.Event()
    compute = checksums.receipt

    def waiting(tensors: Any) -> Any:
        assert staged.wait(60), "the servers waited for the trainer"
        return compute(tensors)

    def arrived(_: Any) -> Any:
        staged.set()

    monkeypatch.setattr(weights_payload, "receipt", waiting)
    fakes[0].faults[STAGE] = arrived
    report = await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)
    assert len(report.details["servers"]) == 2


@pytest.mark.usefixtures("clock")
async def test_weights_that_are_not_finite_end_a_publish_that_hangs_in_staging(
    client: VLLMChatClient, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    look = checksums.refuse_not_finite

    def waiting(tensors: Any) -> None:
        assert told.wait(60)
        look(tensors)

    def arrived(request: Any) -> Any:
        told.set()
        return hanging(request)

    monkeypatch.setattr(weights_payload, "refuse_not_finite", waiting)
    fakes[1].faults[STAGE] = arrived
    with pytest.raises(PublishError, match=r"NaN or infinity, first c\.bias"):
        await BroadcastPolicyPublisher(client).publish(BROKEN, 3)
    assert fakes[0].calls["/pause"] == 0
    assert all(f.version == "default" for f in fakes)
    assert [r.url for r in client.in_rotation()] == [fakes[0].url]
    assert not left_behind()


async def test_a_trainer_that_cannot_score_the_canary_applies_nothing(
    client: VLLMChatClient, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(canary, "prompt_logprobs", broken)
    with pytest.raises(PublishError, match="out of memory"):
        await BroadcastPolicyPublisher(client).publish(ModelWeights(tiny_model()), 3)
    assert all(f.calls["/pause"] == 0 and f.version == "default" for f in fakes)
    assert len(client.in_rotation()) == 2


@pytest.mark.parametrize("path", [STAGE, "/pause", *APPLYING])
async def test_a_server_that_dies_at_any_stage_is_lost_and_the_other_updated(
    client: VLLMChatClient, fakes: Fakes, path: str
) -> None:
    fakes[1].faults[path] = vanishing
    report = await BroadcastPolicyPublisher(client, timeout_s=10).publish(WEIGHTS, 3)
    assert report.details["servers"] == [fakes[0].url]
    assert list(report.details["lost"]) == [fakes[1].url]
    assert (fakes[0].version, fakes[0].paused, fakes[0].active) == ("3", False, False)
    assert [r.url for r in client.in_rotation()] == [fakes[0].url]


@pytest.mark.parametrize("path", [STAGE, "/pause"])
async def test_when_the_last_server_dies_the_error_says_so(
    client: VLLMChatClient, fakes: Fakes, path: str
) -> None:
    for fake in fakes:
        fake.faults[path] = vanishing
    with pytest.raises(PublishError, match=r"no server is left for version 3.*went away"):
        await BroadcastPolicyPublisher(client, timeout_s=10).publish(WEIGHTS, 3)
    assert client.in_rotation() == []


@pytest.mark.usefixtures("clock")
async def test_a_server_that_refuses_to_pause_puts_everyone_back(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    fakes[1].faults["/pause"] = failing(500)
    with pytest.raises(PublishError, match="go on with the versions before") as caught:
        await BroadcastPolicyPublisher(client).publish(WEIGHTS, 3)
    assert all(f.url in str(caught.value).split("go on with the versions before")[1] for f in fakes)
    for fake in fakes:
        assert (fake.version, fake.paused, fake.active) == ("default", False, False)
    assert len(client.in_rotation()) == 2


@pytest.mark.parametrize("path", [STAGE, "/pause"])
async def test_a_publish_that_is_cancelled_before_it_applies_leaves_the_servers_sampling(
    client: VLLMChatClient, fakes: Fakes, path: str
) -> None:
    fakes[0].faults[path] = once(hanging)
    task = asyncio.create_task(BroadcastPolicyPublisher(client).publish(WEIGHTS, 3))
    await until(lambda: fakes[0].calls[path] == 1 and (path != "/pause" or fakes[1].paused))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(f.version == "default" and not f.paused for f in fakes)
    assert len(client.in_rotation()) == 2
    assert not left_behind()


@pytest.mark.usefixtures("clock")
async def test_a_publish_that_is_cancelled_while_a_server_applies_loses_that_server(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    fakes[1].faults["/finish_weight_update"] = hanging
    task = asyncio.create_task(BroadcastPolicyPublisher(client).publish(WEIGHTS, 3))
    await until(lambda: fakes[0].version == "3" and not fakes[0].paused)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "had not applied version 3" in str(client.replicas[1].out)
    assert [r.url for r in client.in_rotation()] == [fakes[0].url]


class SlowPlane(SharedMemoryPlane):
    """Takes its time to prepare."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.ended = threading.Event()

    def prepare(self, weights: Mapping[str, Tensor]) -> Shipment:
        self.begun.set()
        try:
            assert self.go_on.wait(60)
            return super().prepare(weights)
        finally:
            self.ended.set()


async def test_what_a_cancelled_publish_was_preparing_is_removed_when_it_is_there(
    client: VLLMChatClient,
) -> None:
    plane = SlowPlane()
    publisher = BroadcastPolicyPublisher(client, plane=plane, patience_s=0.1)
    task = asyncio.create_task(publisher.publish(WEIGHTS, 3))
    await until(plane.begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    plane.go_on.set()
    await until(plane.ended.is_set)
    await until(lambda: not left_behind())


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("path", "fault"),
    [(STAGE, failing(500)), ("/collective_rpc", failing(500)), ("/collective_rpc", hanging)],
)
async def test_a_server_that_cannot_be_brought_back_does_not_hold_up_the_others(
    client: VLLMChatClient, fakes: Fakes, path: str, fault: Handler
) -> None:
    publisher = BroadcastPolicyPublisher(client, timeout_s=10)
    fakes[1].faults["/finish_weight_update"] = failing(500)
    await publisher.publish(WEIGHTS, 3)
    fakes[1].faults[path] = fault
    report = await publisher.publish(WEIGHTS, 4)
    assert report.details["servers"] == [fakes[0].url]
    assert list(report.details["lost"]) == [fakes[1].url]
    fakes[1].faults.clear()
    assert len((await publisher.publish(WEIGHTS, 5)).details["servers"]) == 2
    assert len(client.in_rotation()) == 2


@pytest.mark.usefixtures("clock")
async def test_a_server_of_unknown_weights_is_not_resumed_by_a_publish_that_fails(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    publisher = BroadcastPolicyPublisher(client, timeout_s=10)
    fakes[1].faults["/finish_weight_update"] = failing(500)
    await publisher.publish(WEIGHTS, 3)
    assert fakes[1].paused
    del fakes[1].faults["/finish_weight_update"]
    fakes[0].faults[STAGE] = failing(500)
    with pytest.raises(PublishError, match=r"out of rotation: \[.*failed while it applied"):
        await publisher.publish(WEIGHTS, 4)
    assert fakes[1].paused
    assert not fakes[0].paused
    assert [r.url for r in client.in_rotation()] == [fakes[0].url]


async def test_a_server_that_a_dead_trainer_left_paused_is_resumed_even_by_a_failed_publish(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    fakes[0].paused = True
    with pytest.raises(PublishError, match="NaN"):
        await BroadcastPolicyPublisher(client).publish(BROKEN, 3)
    assert not fakes[0].paused


@pytest.mark.usefixtures("clock")
async def test_a_deadline_that_passes_while_a_server_pauses_resumes_the_others(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    fakes[1].faults["/pause"] = hanging
    with pytest.raises(DeadlineError, match="the publish of version 3"):
        await BroadcastPolicyPublisher(client, timeout_s=1.0).publish(WEIGHTS, 3)
    assert not fakes[0].paused
    assert all(f.version == "default" for f in fakes)


def test_the_slowest_of_those_who_work_side_by_side_counts() -> None:
    stages = PublishTimes()
    stages.seconds["stage"] = 0.2
    stages.slowest([{"stage": 0.1, "apply": 1.0}, {"apply": 3.0}])
    stages.slowest([{"stage": 2.0}], prefix="worker_")
    assert stages.in_order() == {"stage": 0.2, "apply": 3.0, "worker_stage": 2.0}


async def test_the_first_failure_ends_what_runs_beside_it() -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cancelled")

    async def failing_soon() -> None:
        await asyncio.sleep(0)
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        await together([endless(), failing_soon()])
    assert ended == ["cancelled"]
    await together([])


def once(handler: Handler) -> Handler:
    """Answers so the first time, then as usual."""
    left = [handler]
    return lambda request: left.pop()(request) if left else None
