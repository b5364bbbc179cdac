"""Publishing from a snapshot, while the trainer goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ludic.distributed import (
    AdapterPolicyPublisher,
    BackgroundPublisher,
    BroadcastPolicyPublisher,
    ModelWeights,
    Rank0OnlyPublisher,
    World,
)
from ludic.distributed.background import SnapshotBuffer, in_background
from ludic.distributed.interfaces import PolicyPublisher, PublishReport, Snapshot, Weights
from ludic.distributed.vllm.canary import Canary, prompt_logprobs
from ludic.errors import ConfigError, PublishError
from ludic.inference import VLLMChatClient
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.flags import STAGE
from tests.inference.vllm.fake_server import FakeVLLM, blinking, vanishing
from tests.training.synthetic import RecordingPublisher


class Gate(PolicyPublisher):
    """Publishes when it is let, one version at a time, and remembers what it was given."""

    snapshots = "host"

    def __init__(self) -> None:
        self.open = asyncio.Semaphore(0)
        self.begun: list[int] = []
        self.next = asyncio.Condition()
        self.prepared: list[int] = []
        self.got: dict[int, dict[str, Tensor]] = {}
        self.fails: dict[int, Exception] = {}

    async def prepare(self, weights: Weights, version: int) -> None:
        self.prepared.append(version)

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        assert isinstance(weights, Snapshot)
        async with self.next:
            self.begun.append(version)
            self.next.notify_all()
        await self.open.acquire()
        if version in self.fails:
            raise self.fails[version]
        self.got[version] = {name: tensor.clone() for name, tensor in weights.items()}
        return PublishReport(version, 0.5, details={"stall_s": 0.25})


async def begun(gate: Gate, version: int) -> None:
    async with asyncio.timeout(30), gate.next:
        await gate.next.wait_for(lambda: version in gate.begun)


async def test_the_trainer_goes_on_and_what_arrives_is_what_was_published() -> None:
    gate, weights = Gate(), {"a": torch.ones(3)}
    publisher = BackgroundPublisher(gate)
    report = await publisher.publish(weights, 1)
    assert (report.version, report.bytes, dict(report.details)) == (1, 12, {})
    assert publisher.published is None
    weights["a"].fill_(9.0)  # the next update
    gate.open.release()
    await publisher.settle()
    assert publisher.published == 1
    assert torch.equal(gate.got[1]["a"], torch.ones(3))
    report = await publisher.publish(weights, 2)
    assert report.details == {
        "stall_s": 0.25,
        "background_s": 0.5,
        "sent_bytes": 0,
        "behind": 1,
    }
    gate.open.release()
    await publisher.settle()
    assert torch.equal(gate.got[2]["a"], torch.full((3,), 9.0))


class Blocked:
    """A model's weights that can be read when they are let."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1, bias=False)
        self.read, self.reading = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.reading.set()
        assert self.read.wait(60)
        yield "a", self.model.weight


async def test_weights_on_the_host_are_copied_behind_the_trainer_and_before_they_change() -> None:
    gate, weights = Gate(), Blocked()
    publisher = BackgroundPublisher(gate, held=True)
    before = weights.model.weight.detach().clone()
    await publisher.publish(weights, 1)  # which returns, though nothing can be copied yet
    assert await asyncio.to_thread(weights.reading.wait, 60)
    entered = asyncio.Event()

    async def step() -> None:
        async with publisher.updating():
            entered.set()
            weights.model.weight.data.fill_(9.0)

    stepping = asyncio.create_task(step())
    await asyncio.sleep(0.05)
    assert not entered.is_set()
    weights.read.set()
    await asyncio.wait_for(stepping, 60)
    gate.open.release()
    await publisher.settle()
    assert torch.equal(gate.got[1]["a"], before)


@pytest.mark.parametrize("on_host", [True, False])
async def test_the_canary_is_scored_behind_the_trainer_and_before_the_weights_change(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludic.distributed.background._is_on_host", lambda weights: on_host)
    scoring, scored = asyncio.Event(), asyncio.Event()

    class Scoring(Gate):
        async def read_model(self, weights: Weights, version: int) -> None:
            scoring.set()
            await asyncio.wait_for(scored.wait(), 60)

    gate, entered = Scoring(), asyncio.Event()
    publisher = BackgroundPublisher(gate, held=True)
    weights = Blocked()
    weights.read.set()
    await publisher.publish(weights, 1)  # which returns, though nothing is scored yet
    assert on_host or weights.reading.is_set()  # those on a GPU are copied
    await asyncio.wait_for(scoring.wait(), 60)

    async def step() -> None:
        async with publisher.updating():
            entered.set()

    stepping = asyncio.create_task(step())
    await begun(gate, 1)  # the copy is on its way meanwhile
    assert not entered.is_set()
    scored.set()
    await asyncio.wait_for(stepping, 60)
    gate.open.release()
    await publisher.settle()
    assert publisher.published == 1


async def test_a_model_on_a_gpu_is_read_once_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludic.distributed.background._is_on_host", lambda weights: False)
    weights, was_copied = Blocked(), list[bool]()

    class Reading(Gate):
        async def read_model(self, weights: Weights, version: int) -> None:
            was_copied.append(read.is_set())

    gate, read = Reading(), weights.read
    publisher = BackgroundPublisher(gate, held=True)
    publishing = asyncio.create_task(publisher.publish(weights, 1))
    assert await asyncio.to_thread(weights.reading.wait, 60)
    for _ in range(10):  # as often as anything else may run meanwhile
        await asyncio.sleep(0)
    read.set()
    await publishing
    gate.open.release()
    await publisher.settle()
    assert was_copied == [True]


@pytest.mark.parametrize("turns", range(12))
async def test_no_publish_begins_before_the_reading_of_its_model(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the publish before it ends."""
    monkeypatch.setattr("ludic.distributed.background._is_on_host", lambda weights: False)
    ending, reading, unread = asyncio.Event(), list[int](), list[int]()

    class Reading(PolicyPublisher):
        snapshots = "host"

        async def read_model(self, weights: Weights, version: int) -> None:
            reading.append(version)

        async def publish(self, weights: Weights, version: int) -> PublishReport:
            unread.extend({version} - set(reading))
            if version == 1:
                await ending.wait()
                for _ in range(turns):
                    await asyncio.sleep(0)
            return PublishReport(version, 0.0)

    async def at_once(copy: Callable[[], Any]) -> Any:
        return copy()

    publisher, weights = BackgroundPublisher(Reading(), held=True), {"a": torch.ones(3)}
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    await publisher.publish(weights, 1)
    for _ in range(20):  # as often as anything else may run meanwhile
        await asyncio.sleep(0)
    ending.set()
    await publisher.publish(weights, 2)
    await publisher.settle()
    assert (reading, unread) == ([1, 2], [])


async def test_scores_that_are_taken_for_later_leave_the_model_in_its_mode() -> None:
    model, modes = tiny_model(layers=1, hidden_size=32), list[bool]()
    model.train()
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda *_: modes.append(model.training))
    canary = Canary(True, PROMPT, None)
    await canary.take(model, 1)
    assert (modes, model.training) == ([True], True)
    assert await canary.at(1).own_scores(model) == (PROMPT, prompt_logprobs(model.eval(), PROMPT))


async def test_a_publish_that_is_cancelled_leaves_no_copy_behind_that_goes_on_unseen() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(dict[str, Tensor]):
        def items(self) -> Any:
            begun.set()
            assert go_on.wait(60)
            return super().items()

    publisher = BackgroundPublisher(Gate())
    publish = asyncio.create_task(publisher.publish(Slow(a=torch.ones(2)), 1))
    assert await asyncio.to_thread(begun.wait, 60)
    publish.cancel()
    await asyncio.gather(publish, return_exceptions=True)
    entering = asyncio.create_task(publisher.updating().__aenter__())
    await asyncio.wait([entering], timeout=0.2)
    assert not entering.done(), "the weights may not change while a thread copies them"
    go_on.set()
    await entering


async def test_a_copy_behind_the_trainer_that_fails_is_raised_by_every_wait() -> None:
    class Broken(Blocked):
        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            raise PublishError("cannot be merged")

    publisher = BackgroundPublisher(Gate(), held=True)
    await publisher.publish(Broken(), 1)
    for _ in range(2):
        with pytest.raises(PublishError, match=r"version 1 was not published.*cannot be merged"):
            await publisher.settle()
    async with publisher.updating():
        pass
    await publisher.abandon()


async def test_one_that_has_not_begun_is_replaced_by_a_newer_one() -> None:
    gate, weight = Gate(), torch.zeros(2)
    publisher = BackgroundPublisher(gate)
    for version in range(1, 5):
        weight.fill_(version)
        await publisher.publish({"a": weight}, version)
        await begun(gate, 1)
    assert publisher.state_dict() == {"published": None, "on_their_way": [1, 4]}
    for _ in range(2):
        gate.open.release()
    await publisher.settle()
    assert (gate.begun, gate.prepared) == ([1, 4], [1, 2, 3, 4])
    assert {version: float(got["a"][0]) for version, got in gate.got.items()} == {1: 1.0, 4: 4.0}
    assert publisher.state_dict() == {"published": 4, "on_their_way": []}


async def test_two_buffers_serve_every_publish() -> None:
    gate, places = Gate(), set[int]()
    publisher = BackgroundPublisher(gate)
    for version in range(5):
        await publisher.publish({"a": torch.full((4,), float(version))}, version)
        if version:
            gate.open.release()  # the one before ends while this one has its copy
        await begun(gate, version)
        buffers = [buffer._tensors.values() for buffer in publisher._buffers]
        places |= {tensor.data_ptr() for tensors in buffers for tensor in tensors}
    gate.open.release()
    await publisher.settle()
    assert len(places) == 2
    assert [float(got["a"][0]) for got in gate.got.values()] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_buffer_takes_weights_that_change_their_shape_or_names() -> None:
    buffer = SnapshotBuffer(on_device=False)
    first = buffer.take({"a": torch.ones(2), "b": torch.ones(3)})
    second = buffer.take({"b": torch.zeros(3), "c": torch.ones(1), "a": torch.ones(5)})
    assert list(second) == ["b", "c", "a"]
    assert second["b"].data_ptr() == first["b"].data_ptr()
    assert second["a"].shape == (5,)


async def test_a_failure_is_raised_by_the_next_publish_and_every_wait() -> None:
    gate = Gate()
    publisher = BackgroundPublisher(gate)
    gate.fails[2] = PublishError("http://gpu-7:8000 refused")
    await publisher.publish({"a": torch.ones(1)}, 1)
    gate.open.release()
    await publisher.settle()
    await publisher.publish({"a": torch.ones(1)}, 2)
    await begun(gate, 2)
    await publisher.publish({"a": torch.ones(1)}, 3)  # waits its turn, which never comes
    gate.open.release()
    says = "version 2 was not published in the background; version 1 is what .*gpu-7:8000 refused"
    for _ in range(2):
        with pytest.raises(PublishError, match=says):
            await publisher.settle()
    with pytest.raises(PublishError, match=says):
        publisher.check()
    with pytest.raises(PublishError, match=says):
        await publisher.publish({"a": torch.ones(1)}, 4)
    assert (publisher.published, gate.begun) == (1, [1, 2])


async def test_one_that_hangs_past_its_deadline_fails() -> None:
    publisher = BackgroundPublisher(Gate(), timeout_s=0.05)
    await publisher.publish({"a": torch.ones(1)}, 1)
    with pytest.raises(PublishError, match=r"the publish of version 1 in the background .*Gate"):
        await publisher.settle()


async def test_abandoning_ends_what_is_under_way_and_is_no_failure() -> None:
    gate = Gate()
    publisher = BackgroundPublisher(gate)
    await publisher.publish({"a": torch.ones(1)}, 1)
    await begun(gate, 1)
    await publisher.publish({"a": torch.ones(1)}, 2)
    await publisher.abandon()
    await publisher.settle()
    assert (gate.begun, gate.got, publisher.published) == ([1], {}, None)
    await publisher.publish({"a": torch.ones(1)}, 3)
    gate.open.release()
    await publisher.settle()
    assert publisher.published == 3


def test_an_event_loop_that_ends_too_early_is_said() -> None:
    gate = Gate()
    publisher = BackgroundPublisher(gate)

    async def leave() -> None:
        await publisher.publish({"a": torch.ones(1)}, 1)
        await begun(gate, 1)

    asyncio.run(leave())
    with pytest.raises(PublishError, match="the publish of version 1 was cut short"):
        asyncio.run(publisher.settle())


async def test_a_sampler_that_shares_the_weights_hears_at_once() -> None:
    class Sharing(RecordingPublisher):
        shares_weights = True

    gate, sharing = Gate(), Sharing()
    publisher = BackgroundPublisher(gate, beside=sharing)
    assert publisher.shares_weights
    await publisher.publish({"a": torch.ones(1)}, 7)
    assert (sharing.versions, publisher.published) == ([7], None)
    async with publisher.updating():
        assert sharing.updates == 1
    await publisher.abandon()


def test_only_what_takes_snapshots_is_put_in_the_background() -> None:
    at_once = RecordingPublisher()
    assert in_background(at_once) is at_once
    assert isinstance(in_background(Gate()), BackgroundPublisher)
    client = VLLMChatClient("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="RecordingPublisher cannot publish from a snap"):
        BackgroundPublisher(at_once)
    assert isinstance(in_background(AdapterPolicyPublisher(client)), BackgroundPublisher)
    assert BroadcastPolicyPublisher(client, plane="ipc").snapshots == "device"


async def test_rank_0_copies_the_weights_once_and_reads_all_of_them_even_after_a_failure() -> None:
    class Lazy:
        reads = 0

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            yield "a", torch.ones(2)
            yield "b", torch.ones(2)
            self.reads += 1

    gate, weights = Gate(), Lazy()
    publisher = Rank0OnlyPublisher(BackgroundPublisher(gate), World())
    gate.fails[1] = PublishError("gone")
    await publisher.publish(weights, 1)
    gate.open.release()
    with pytest.raises(PublishError, match="gone"):
        await publisher.settle()
    with pytest.raises(PublishError, match="gone"):
        await publisher.publish(weights, 2)
    assert weights.reads == 2  # as on the other ranks, which gather before they hear of it
    await publisher.abandon()


PROMPT = (1, 2, 3)


def scoring_as(model: Any) -> FakeVLLM:
    """A server that scores the prompt as the model does now."""
    scores = zip(PROMPT[1:], prompt_logprobs(model, PROMPT), strict=True)
    rows = [None, *({str(token): {"logprob": score}} for token, score in scores)]
    choice = {"token_ids": [1], "finish_reason": "length"}
    answer = {"choices": [choice], "prompt_logprobs": rows}
    return FakeVLLM(faults={"/inference/v1/generate": lambda _: answer})


async def test_the_canary_is_scored_by_the_model_as_it_was_when_it_was_copied() -> None:
    model = tiny_model(layers=1, hidden_size=32)
    server = scoring_as(model)
    async with server.serving() as fake, VLLMChatClient(fake.url, model="tiny") as client:
        direct = BroadcastPolicyPublisher(client, canary_prompt=PROMPT)
        publisher = BackgroundPublisher(direct)
        await publisher.publish(ModelWeights(model), 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        await publisher.settle()
        report = await publisher.publish({"a": torch.ones(1)}, 2)
        assert report.details["canary_max"] == pytest.approx(0.0, abs=1e-6)
        now = await direct._canary.own_scores(model)
        assert now != await direct._canary.at(1).own_scores(model)
        await publisher.settle()
        assert fake.applied == 2


async def test_a_snapshot_whose_scores_were_forgotten_has_no_canary() -> None:
    model = tiny_model(layers=1, hidden_size=32)
    async with FakeVLLM().serving() as fake, VLLMChatClient(fake.url, model="tiny") as client:
        direct = BroadcastPolicyPublisher(client, canary_prompt=PROMPT)
        snapshot = SnapshotBuffer(on_device=False).take(ModelWeights(model))
        for version in (1, 5):  # the first waits for its turn until the second is copied
            await direct.read_model(ModelWeights(model), version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        report = await direct.publish(snapshot, 1)
        assert "canary_max" not in report.details
        assert fake.applied == 1


async def test_the_canary_of_a_publish_is_not_forgotten_while_it_is_under_way() -> None:
    model = tiny_model(layers=1, hidden_size=32)
    server = scoring_as(model)
    async with server.serving() as fake, VLLMChatClient(fake.url, model="tiny") as client:
        direct = BroadcastPolicyPublisher(client, canary_prompt=PROMPT)
        await direct.read_model(ModelWeights(model), 1)
        snapshot = SnapshotBuffer(on_device=False).take(ModelWeights(model))

        async def train_on() -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3.0)
            await direct.read_model(ModelWeights(model), 5)

        direct.before = train_on
        report = await direct.publish(snapshot, 1)
        assert report.details["canary_max"] == pytest.approx(0.0, abs=1e-6)


async def test_rank_0_drops_what_has_not_begun_before_it_gathers() -> None:
    gate, waiting = Gate(), list[list[int]]()
    inner = BackgroundPublisher(gate)

    class Looking:
        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            waiting.append(inner.state_dict()["on_their_way"])
            yield "a", torch.ones(2)

    publisher = Rank0OnlyPublisher(inner, World())
    for version in (1, 2, 3):
        await publisher.publish(Looking(), version)
        await begun(gate, 1)
    assert waiting == [[], [1], [1]]
    for _ in range(2):
        gate.open.release()
    await publisher.settle()
    assert gate.begun == [1, 3]


async def test_a_server_that_dies_half_way_stops_the_next_publish_by_name() -> None:
    async with FakeVLLM().serving() as fake, VLLMChatClient(fake.url, model="tiny") as client:
        publisher = BackgroundPublisher(BroadcastPolicyPublisher(client, canary=False))
        await publisher.publish({"a": torch.ones(2)}, 1)
        await publisher.settle()
        before = fake.staged

        async def die(_: object) -> None:
            await asyncio.sleep(0)
            raise ConnectionResetError

        fake.faults[STAGE] = die
        await publisher.publish({"a": torch.zeros(2)}, 2)
        with pytest.raises(PublishError, match=f"version 2 was not published.*{fake.url}"):
            await publisher.settle()
        assert (publisher.published, fake.applied, fake.staged) == (1, 1, before)


async def test_a_publish_that_its_only_server_refuses_is_not_tried_again() -> None:
    model = tiny_model(layers=1, hidden_size=32)
    server = scoring_as(model)
    async with server.serving() as fake, VLLMChatClient(fake.url, model="tiny") as client:
        publisher = BroadcastPolicyPublisher(client, canary_prompt=PROMPT)
        began: list[int] = []

        async def look() -> None:
            began.append(1)

        publisher.before = look
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        await publisher.read_model(ModelWeights(model), 1)
        snapshot = SnapshotBuffer(on_device=False).take(ModelWeights(model))
        with pytest.raises(PublishError, match="log-probs of the canary differ"):
            await publisher.publish(snapshot, 1)
        assert (len(began), fake.applied) == (1, 1)


async def test_a_publish_that_loses_every_server_goes_to_one_that_comes() -> None:
    async with FakeVLLM().serving() as fake, VLLMChatClient(fake.url, model="tiny") as client:
        publisher = BroadcastPolicyPublisher(client, canary=False)
        starts: list[str] = []

        async def look() -> None:
            starts.append(f"start {len(starts)}")
            client.set_servers({fake.url: starts[-1]}, joining="it is new")

        publisher.before = look
        fake.faults[STAGE] = blinking()
        report = await publisher.publish(Snapshot({"a": torch.zeros(2)}), 2)
        assert len(starts) == 2
        assert report.details["servers"] == [fake.url]
        assert fake.applied == 1
        fake.faults[STAGE] = vanishing
        with pytest.raises(PublishError, match="no server is left for version 3"):
            await publisher.publish(Snapshot({"a": torch.ones(2)}), 3)
