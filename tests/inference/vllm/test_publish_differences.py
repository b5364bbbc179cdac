"""Differences to a real vLLM server: what it serves afterwards is what the trainer has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2ForCausalLM

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.shared_folders import shared_folder
from ludic.distributed.vllm.planes import SharedMemoryPlane, Shipment
from ludic.errors import PublishError
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import VLLMServer
from ludic.sharding.weights import ModelWeights
from tests.forked import run_ranks
from tests.inference.vllm.asking import PATIENT
from tests.inference.vllm.conftest import NAME, server_model, tiny_server
from tests.inference.vllm.test_publish import assert_serves

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]


@torch.no_grad()
def moved(model: Qwen2ForCausalLM, seed: int, share: float = 0.05) -> Qwen2ForCausalLM:
    """Some of the weights change, as in a step with a small learning rate."""
    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        chosen = torch.rand(parameter.shape, generator=source) < share
        noise = torch.randn(parameter.shape, generator=source) * parameter.std().nan_to_num(1.0)
        parameter[chosen] += noise[chosen]
    return model


class BendsDifferences(SharedMemoryPlane):
    """Changes one bit of what travels, unless it is everything."""

    def prepare(self, weights: Mapping[str, Tensor]) -> Shipment:
        if all(tensor.dtype == torch.uint8 for tensor in weights.values()):
            name = "model.layers.0.mlp.down_proj.weight"
            bent = weights[name].clone()
            bent[9] ^= 1
            weights = {**weights, name: bent}
        return super().prepare(weights)


@pytest.mark.parametrize("plane", ["shared_memory", "gloo"])
async def test_differences_follow_each_other_and_the_server_has_the_trainers_weights(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, model: Any, plane: Any
) -> None:
    by_difference = BroadcastPolicyPublisher(client, plane=plane, differences=True, **PATIENT)
    first = await by_difference.publish(ModelWeights(model), 1)
    assert first.details["sent"] == "weights"
    for version in (2, 3):
        report = await by_difference.publish(ModelWeights(moved(model, version)), version)
        assert report.details["sent"] == "difference"
        assert 0 < report.bytes < 0.15 * first.bytes
        assert report.verified
        await assert_serves(client, model, version)
    # Whoever publishes all weights as ever has the copy removed.
    await BroadcastPolicyPublisher(client, **PATIENT).publish(ModelWeights(model), 3)
    assert not list(shared_folder().glob(f"*copy-{by_difference.payload._confirmed.key}"))  # type: ignore[attr-defined]


async def test_a_difference_that_arrives_bent_is_never_used_and_all_weights_follow(
    client: VLLMChatClient,
    publisher: BroadcastPolicyPublisher,
    model: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bending = BroadcastPolicyPublisher(
        client, plane=BendsDifferences(), differences=True, **PATIENT
    )
    await bending.publish(ModelWeights(model), 1)
    report = await bending.publish(ModelWeights(moved(model, 2)), 2)
    assert report.details["sent"] == "weights"
    assert "1 arrived changed ['model.layers.0.mlp.down_proj.weight']" in caplog.text
    assert client.replicas[0].url in caplog.text
    await assert_serves(client, model, 2)


async def test_after_a_failed_publish_the_server_goes_on_and_the_next_one_is_whole(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, model: Any
) -> None:
    by_difference = BroadcastPolicyPublisher(client, differences=True, **PATIENT)
    await by_difference.publish(ModelWeights(model), 1)
    before = server_model()
    before.load_state_dict(model.state_dict())
    broken = dict(ModelWeights(moved(model, 2)))
    broken["model.norm.weight"] = broken["model.norm.weight"] * torch.nan
    with pytest.raises(PublishError, match="version 2 was not published"):
        await by_difference.publish(broken, 2)
    await assert_serves(client, before, 1)
    report = await by_difference.publish(ModelWeights(model), 3)
    assert report.verified
    await assert_serves(client, model, 3)


async def test_a_server_that_joins_gets_all_weights(
    two_servers: tuple[VLLMServer, VLLMServer], model: Any
) -> None:
    first, second = (server.url for server in two_servers)
    async with VLLMChatClient([first, second], model=NAME) as client:
        both, client.replicas = client.replicas, client.replicas[:1]
        publisher = BroadcastPolicyPublisher(client, differences=True, **PATIENT)
        await publisher.publish(ModelWeights(model), 1)
        client.replicas = both
        report = await publisher.publish(ModelWeights(moved(model, 2)), 2)
        assert report.details["sent"] == "weights"
        assert set(report.details["servers"]) == {first, second}
        report = await publisher.publish(ModelWeights(moved(model, 3)), 3)
        assert report.details["sent"] == "difference"
        assert len(list(shared_folder().glob(f"*copy-{publisher.payload._confirmed.key}"))) == 1  # type: ignore[attr-defined]
        await assert_serves(client, model, 3)


async def check_two_ranks(url: str, folder: Path) -> None:
    """Two ranks publish all weights by shards, then a difference. Every worker's checksums of the
    host's copy were those of rank 0; what is sampled is what the gathered weights compute."""
    file = folder / "gathered.safetensors"
    script = Path(__file__).parents[2] / "sharding/publishing_ranks.py"
    run_ranks(script, f"{url} {file}")
    model = server_model()
    model.load_state_dict(load_file(file), strict=False)
    async with VLLMChatClient(url, model=NAME) as client:
        await assert_serves(client, model, 2)


async def test_what_two_ranks_publish_by_shards_is_what_the_server_has(
    server: VLLMServer, tmp_path: Path
) -> None:
    await check_two_ranks(server.url, tmp_path)


@pytest.fixture
def split_server(model_folder: Path, tmp_path: Path) -> Iterator[VLLMServer]:
    """A server whose model is split over two ranks on the CPU."""
    split = ("--tensor-parallel-size", "2")
    found = tiny_server(model_folder, tmp_path / "log", extra=split)
    try:
        found.start()
        found.wait_until_healthy()
        yield found
    finally:
        found.stop()


async def test_each_rank_of_a_split_server_loads_its_part_of_what_two_ranks_publish(
    split_server: VLLMServer, tmp_path: Path
) -> None:
    await check_two_ranks(split_server.url, tmp_path)
