"""Differences to servers, and what happens when a server, or what it holds, is not as expected.

The servers are stand-ins with a real copy on this host; `tests/inference/vllm/` has real ones.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ludic.distributed.host_copy import HostCopy
from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.vllm.checksums import receipt
from ludic.distributed.vllm.planes import IPCPlane, SharedMemoryPlane, Shipment
from ludic.errors import ConfigError, PublishError
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.flags import STAGE
from tests.inference.vllm.fake_server import FakeVLLM, failing, vanishing

Fakes = tuple[FakeVLLM, FakeVLLM]
BYTES = 4 * 1000 + 2 * 500


def weights(version: int) -> dict[str, Tensor]:
    """Each version differs from the others in a few elements."""
    a, b = torch.arange(1000.0).view(10, 100), torch.ones(500, dtype=torch.bfloat16)
    a[version], b[7 * version] = -0.0, version
    return {"a": a, "b": b}


@pytest.fixture
async def fakes() -> AsyncIterator[Fakes]:
    async with FakeVLLM().serving() as first, FakeVLLM().serving() as second:
        yield first, second
        for fake in (first, second):
            if fake.copy is not None:
                fake.copy.close()


@pytest.fixture
async def client(fakes: Fakes) -> AsyncIterator[VLLMChatClient]:
    async with VLLMChatClient([fake.url for fake in fakes], max_retries=0) as found:
        yield found


@pytest.fixture
def publisher(client: VLLMChatClient) -> BroadcastPolicyPublisher:
    return BroadcastPolicyPublisher(client, differences=True)


async def sent(publisher: BroadcastPolicyPublisher, version: int) -> str:
    report = await publisher.publish(weights(version), version)
    assert report.verified
    assert (report.bytes < BYTES) == (report.details["sent"] == "difference")
    return str(report.details["sent"])


def holds(fake: FakeVLLM, version: int) -> bool:
    """Whether the server says that it has this version, and its host's copy is that to the bit."""
    copy = fake.copy
    assert copy is not None
    assert copy.holds is not None
    same = receipt(copy.bring(copy.holds, {}).items()) == receipt(weights(version).items())
    return same and fake.version == str(version)


async def test_after_the_first_publish_only_what_changed_is_sent(
    publisher: BroadcastPolicyPublisher, fakes: Fakes
) -> None:
    assert await sent(publisher, 1) == "weights"
    for version in (2, 3, 4):
        assert await sent(publisher, version) == "difference"
        assert all(holds(fake, version) for fake in fakes)
    report = await publisher.publish(weights(4), 5)
    assert report.bytes == 0


async def test_without_differences_nobody_keeps_a_copy(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    publisher = BroadcastPolicyPublisher(client)
    assert [await sent(publisher, version) for version in (1, 2)] == ["weights", "weights"]
    assert fakes[0].copy is None


async def test_a_server_that_restarted_gets_all_weights(
    publisher: BroadcastPolicyPublisher, fakes: Fakes
) -> None:
    await sent(publisher, 1)
    assert fakes[1].copy is not None
    fakes[1].copy.close()
    fakes[1].copy, fakes[1].version = None, "default"
    assert await sent(publisher, 2) == "weights"
    assert await sent(publisher, 3) == "difference"
    assert all(holds(fake, 3) for fake in fakes)


async def test_a_trainer_that_restarted_sends_all_weights(
    publisher: BroadcastPolicyPublisher, fakes: Fakes, client: VLLMChatClient
) -> None:
    await sent(publisher, 1)
    await sent(publisher, 2)
    for fake in fakes:  # it was killed when it had staged half of the next
        fake.active = True
    again = BroadcastPolicyPublisher(client, differences=True)
    fakes[0].copy = fakes[1].copy = None
    assert await sent(again, 2) == "weights"
    assert await sent(again, 3) == "difference"
    assert all(holds(fake, 3) for fake in fakes)


async def test_a_server_that_dies_half_way_is_out_and_comes_back_with_all_weights(
    publisher: BroadcastPolicyPublisher, fakes: Fakes, client: VLLMChatClient
) -> None:
    await sent(publisher, 1)
    fakes[1].faults[STAGE] = vanishing
    report = await publisher.publish(weights(2), 2)
    assert report.details["servers"] == [fakes[0].url]
    assert "take the tensors" in report.details["lost"][fakes[1].url]
    assert fakes[1].version == "1"
    assert holds(fakes[0], 2)
    # Its host's copy is there, but the server that comes back has not loaded from it.
    fakes[1].faults.clear()
    fakes[1].copy = None
    assert await sent(publisher, 3) == "weights"
    assert all(holds(fake, 3) for fake in fakes)


class Bending(SharedMemoryPlane):
    """Changes one bit of what travels: of differences, or of everything."""

    def __init__(self, everything: bool) -> None:
        self.everything = everything

    def prepare(self, tensors: Mapping[str, Tensor]) -> Shipment:
        difference = tensors["b"].dtype == torch.uint8
        if difference or self.everything:
            bent = tensors["b"].clone()
            bent.view(torch.uint8)[8] ^= 1  # a value, not the number of them
            tensors = {**tensors, "b": bent}
        return super().prepare(tensors)


async def test_a_difference_that_arrives_changed_is_followed_by_all_weights(
    client: VLLMChatClient, fakes: Fakes, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = BroadcastPolicyPublisher(client, plane=Bending(False), differences=True)
    await sent(publisher, 1)
    with caplog.at_level(logging.WARNING, logger="ludic.distributed"):
        assert await sent(publisher, 2) == "weights"
    assert "version 2 goes out whole" in caplog.text
    assert "1 arrived changed ['b']" in caplog.text
    assert all(holds(fake, 2) and fake.applied == 2 for fake in fakes)


async def test_where_all_weights_arrive_changed_too_the_error_names_server_and_version(
    client: VLLMChatClient, fakes: Fakes
) -> None:
    plane = Bending(False)
    publisher = BroadcastPolicyPublisher(client, plane=plane, differences=True)
    await sent(publisher, 1)
    plane.everything = True
    with pytest.raises(PublishError, match=rf"version 2 was not published: {fakes[0].url[:12]}"):
        await publisher.publish(weights(2), 2)
    assert all(fake.version == "1" and fake.applied == 1 for fake in fakes)
    plane.everything = False
    assert await sent(publisher, 3) == "weights"
    assert all(holds(fake, 3) for fake in fakes)


@pytest.mark.usefixtures("clock")
async def test_a_host_whose_copy_is_gone_half_way_gets_all_weights(
    publisher: BroadcastPolicyPublisher, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sent(publisher, 1)
    bring = HostCopy.bring

    def losing(copy: HostCopy, *args: Any, base: str | None = None, **more: Any) -> Any:
        if base is not None:  # as after another worker was killed while it wrote
            copy._write({})
        return bring(copy, *args, base=base, **more)

    monkeypatch.setattr(HostCopy, "bring", losing)
    fakes[0].faults[STAGE] = failing(500, times=1)
    assert await sent(publisher, 2) == "weights"
    monkeypatch.undo()
    assert all(holds(fake, 2) for fake in fakes)


@pytest.mark.usefixtures("clock")
async def test_a_publish_that_was_staged_and_not_used_is_no_base(
    publisher: BroadcastPolicyPublisher, fakes: Fakes
) -> None:
    await sent(publisher, 1)
    fakes[1].faults["/pause"] = failing(500, times=1)
    with pytest.raises(PublishError, match=rf"version 2 was not published: {fakes[1].url}"):
        await publisher.publish(weights(2), 2)
    assert all(fake.version == "1" for fake in fakes)
    assert await sent(publisher, 3) == "weights"
    assert all(holds(fake, 3) for fake in fakes)


async def test_weights_that_are_not_finite_are_not_sent_whole_after_the_difference(
    publisher: BroadcastPolicyPublisher, fakes: Fakes
) -> None:
    await sent(publisher, 1)
    broken = weights(2)
    broken["a"][0, 0] = torch.nan
    with pytest.raises(PublishError, match="NaN or infinity"):
        await publisher.publish(broken, 2)
    assert all(fake.calls[STAGE] <= 3 for fake in fakes)  # 1, 2 and its discard
    assert all(fake.version == "1" for fake in fakes)


async def test_other_tensors_than_before_are_sent_whole(
    publisher: BroadcastPolicyPublisher,
) -> None:
    await sent(publisher, 1)
    more = {**weights(2), "c": torch.ones(3)}
    assert (await publisher.publish(more, 2)).details["sent"] == "weights"


async def test_over_cuda_ipc_differences_are_refused(client: VLLMChatClient) -> None:
    with pytest.raises(ConfigError, match="nothing travels"):
        await BroadcastPolicyPublisher(client, plane=IPCPlane(), differences=True).publish(
            weights(1), 1
        )
