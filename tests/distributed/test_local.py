"""Publishing where nothing travels, and where one rank speaks for all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from ludic.distributed import LocalPolicyPublisher, ModelWeights, Rank0OnlyPublisher, World
from ludic.distributed.interfaces import PolicyPublisher, PublishReport, Weights
from ludic.errors import PublishError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local import LocalChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.types import ChatResponse
from tests.training.synthetic import RecordingPublisher


class Client:
    def __init__(self) -> None:
        self.versions: list[int] = []
        self.held = 0

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        self.held += 1
        yield
        self.held -= 1

    def samples_from(self, model: torch.nn.Module) -> bool:
        return True

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        assert not params
        self.versions.append(version)
        return "shared"

    async def get_policy_version(self) -> int:
        return self.versions[-1]

    @property
    def max_context_tokens(self) -> int | None:
        return None

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        raise AssertionError("nobody samples here")


async def test_a_shared_module_is_held_while_it_changes_and_then_named() -> None:
    client = Client()
    publisher = LocalPolicyPublisher(client)
    async with publisher.updating():
        assert client.held == 1
    report = await publisher.publish({}, 3)
    assert client.versions == [3]
    assert (report.version, report.verified, report.bytes) == (3, True, 0)


async def test_a_client_that_does_not_take_the_version_in_is_found_out() -> None:
    class Deaf(Client):
        async def get_policy_version(self) -> int:
            return 0

    with pytest.raises(PublishError, match=r"version 3 was published .* samples from 0"):
        await LocalPolicyPublisher(Deaf()).publish({}, 3)


async def test_the_real_engine_takes_versions_and_pauses() -> None:
    async with LocalChatClient(tiny_model(), tiny_tokenizer(), max_slots=2) as client:
        publisher = LocalPolicyPublisher(client)
        async with publisher.updating():
            pass
        await publisher.publish({}, 4)
        assert await client.get_policy_version() == 4


async def test_a_client_that_no_update_would_reach_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    adapter, model = LoraConfig(r=2, target_modules=["q_proj"]), tiny_model()
    async with LocalChatClient(model, tiny_tokenizer(), max_slots=2) as client:
        publisher = LocalPolicyPublisher(client)
        await publisher.publish(ModelWeights(model), 1)
        later = get_peft_model(model, adapter)
        for other in (tiny_model(), later):
            with pytest.raises(PublishError, match="does not sample from the module"):
                await publisher.publish(ModelWeights(other), 2)
    async with LocalChatClient(later, tiny_tokenizer(), max_slots=2) as client:
        await LocalPolicyPublisher(client).publish(ModelWeights(later), 2)


async def test_naming_shared_weights_holds_up_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise AssertionError("the engine was paused to be told a number")

    async with LocalChatClient(tiny_model(), tiny_tokenizer(), max_slots=2) as client:
        monkeypatch.setattr(client, "updating", refuse)
        await LocalPolicyPublisher(client).publish({}, 4)
        assert await client.get_policy_version() == 4


async def test_rank_0_sends_copies_of_what_was_gathered() -> None:
    inner, model = RecordingPublisher(), tiny_model()
    report = await Rank0OnlyPublisher(inner, World()).publish(ModelWeights(model), 2)
    assert report.version == 2
    for name, parameter in model.named_parameters():
        assert torch.equal(inner.weights[0][name], parameter)
        assert inner.weights[0][name].data_ptr() != parameter.data_ptr()


async def test_what_goes_wrong_at_rank_0_is_raised() -> None:
    class Failing(RecordingPublisher):
        async def publish(self, weights: Weights, version: int) -> PublishReport:
            raise PublishError("the server refused")

    with pytest.raises(PublishError, match="the server refused"):
        await Rank0OnlyPublisher(Failing(), World()).publish({}, 1)
    with pytest.raises(PublishError, match="no publisher"):
        Rank0OnlyPublisher(None, World())


class OnlyPublishes(PolicyPublisher):
    async def publish(self, weights: Weights, version: int) -> PublishReport:
        return PublishReport(version, 0.0)


async def test_a_publisher_that_writes_publish_alone_is_one_of_a_copy() -> None:
    publisher = OnlyPublishes()
    assert publisher.shares_weights is False
    async with publisher.updating():
        report = await publisher.publish({}, 1)
    assert report == PublishReport(1, 0.0)


def test_rank_0_s_publisher_says_whether_the_weights_are_shared() -> None:
    assert Rank0OnlyPublisher(LocalPolicyPublisher(Client()), World()).shares_weights
    assert not Rank0OnlyPublisher(OnlyPublishes(), World()).shares_weights
    assert not Rank0OnlyPublisher(None, World(rank=1, size=2)).shares_weights
