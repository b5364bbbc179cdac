"""Publishing to a real vLLM server while it serves."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.shared_folders import shared_folder
from ludic.distributed.vllm import checksums, weights_payload
from ludic.distributed.vllm.planes import BroadcastPlane, SharedMemoryPlane, Shipment
from ludic.errors import DeadlineError, PublishError
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.switching import CANARY
from ludic.sharding.weights import ModelWeights
from ludic.types import TokenTrace
from tests.inference.vllm.asking import (
    PATIENT,
    largest_gap,
    request,
    scored,
    trace_of,
    until_in_flight,
)
from tests.inference.vllm.conftest import server_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]


async def sampled(client: VLLMChatClient, seed: int = 1) -> TokenTrace:
    return trace_of(await client.complete_tokens(request(max_tokens=8, seed=seed)))


async def assert_serves(client: VLLMChatClient, model: Qwen2ForCausalLM, version: int) -> None:
    """The server has this version's name and this model's log-probs."""
    assert await client.get_policy_version() == version
    trace = await sampled(client)
    assert {span.version for span in trace.version_spans} == {version}
    assert largest_gap(scored(model, trace), trace.completion_logprobs) <= 1e-3


async def test_a_publish_changes_what_the_server_samples_from(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher
) -> None:
    newer = server_model(seed=9)
    report = await publisher.publish(ModelWeights(newer), 7)
    assert report.verified
    assert report.version == 7
    assert report.bytes == sum(t.numel() * 4 for t in newer.parameters())
    assert report.details["canary_max"] <= 1e-3
    scored = await client.control(client.replicas[0], "GET", CANARY, timeout_s=60)
    assert scored["scores"], "it scored the canary that came with the switch"
    stages = report.details["stages"]
    assert stages["worker_stage"] + stages["worker_checksums"] <= stages["stage"]
    await assert_serves(client, newer, 7)
    assert not list(shared_folder().glob(f"ludic-publish-{os.getpid()}-*"))


async def test_an_update_over_sixteen_running_requests_loses_none_and_names_every_token(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, model: Qwen2ForCausalLM
) -> None:
    newer = server_model(seed=9)
    published = asyncio.Event()

    async def ask_on_and_on(n: int) -> list[TokenTrace]:
        traces: list[TokenTrace] = []
        while not published.is_set() or not traces:
            # Of different lengths, so that they do not all end in the same step.
            length = 160 + 10 * n
            asked = request(
                range(30 + n, 50 + n), max_tokens=length, seed=len(traces), endless=True
            )
            traces.append(trace_of(await client.complete_tokens(asked)))
            assert len(traces[-1].completion_token_ids) == length
        return traces

    tasks = [asyncio.create_task(ask_on_and_on(n)) for n in range(16)]
    await until_in_flight(client.replicas[0], 16)
    await publisher.publish(ModelWeights(newer), 1)
    published.set()
    traces = [trace for task in tasks for trace in await task]
    assert any(len(t.version_spans) == 2 for t in traces)
    for trace in traces:
        spans = trace.version_spans
        assert [s.version for s in spans] in ([0], [0, 1], [1])
        assert spans[0].start == 0
        assert spans[-1].end == len(trace.completion_token_ids)
        assert all(a.end == b.start for a, b in pairwise(spans))
        assert trace.completion_logprobs is not None
        # Each token's log-prob is that of the weights which its span names: what was computed
        # with the old weights is computed anew, so the new ones see their own keys and values.
        for span in spans:
            exact = scored((model, newer)[span.version], trace)[span.start : span.end]
            found = trace.completion_logprobs[span.start : span.end]
            assert largest_gap(exact, found) <= 1e-3


async def test_a_server_samples_from_the_old_weights_while_the_new_ones_are_staged(
    client: VLLMChatClient,
    publisher: BroadcastPolicyPublisher,
    model: Qwen2ForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    compute = checksums.receipt

    def waiting(tensors: Any) -> Any:
        assert go_on.wait(600)
        return compute(tensors)

    monkeypatch.setattr(weights_payload, "receipt", waiting)
    newer = server_model(seed=9)
    task = asyncio.create_task(publisher.publish(ModelWeights(newer), 1))
    try:
        await until_staged(client)
        await assert_serves(client, model, 0)
        assert not task.done()
    finally:
        go_on.set()
    await task
    await assert_serves(client, newer, 1)


async def until_staged(client: VLLMChatClient) -> None:
    """Waits until the server has an update that is not yet applied."""
    body = {"method": "ludic_receipt"}
    async with asyncio.timeout(600):
        while True:
            answer = await client.control(
                client.replicas[0], "POST", "/collective_rpc", body=body, timeout_s=30
            )
            if answer["results"][0]["tensors"]:
                return
            await asyncio.sleep(0.05)


async def test_nothing_of_the_old_weights_stays_in_the_prefix_cache(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher
) -> None:
    long = request(range(1, 200), max_tokens=4)
    await client.complete_tokens(long)
    newer = server_model(seed=9)
    await publisher.publish(ModelWeights(newer), 1)
    trace = trace_of(await client.complete_tokens(long))
    assert largest_gap(scored(newer, trace), trace.completion_logprobs) <= 1e-3


async def test_a_tensor_left_out_is_caught_and_the_old_weights_stay(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, model: Qwen2ForCausalLM
) -> None:
    for name in ("model.layers.1.self_attn.q_proj.bias", "model.norm.weight"):
        weights = dict(ModelWeights(server_model(seed=9)))
        del weights[name]
        with pytest.raises(PublishError, match=name) as caught:
            await publisher.publish(weights, 1)
        assert "go on with the versions before: {'http" in str(caught.value)
        await assert_serves(client, model, 0)


async def test_another_model_s_weights_are_refused(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, model: Qwen2ForCausalLM
) -> None:
    wide = tiny_model(hidden_size=128, heads=4, kv_heads=2)
    with pytest.raises(PublishError, match="arrived with shape"):
        await publisher.publish(ModelWeights(wide), 1)
    deep = tiny_model(layers=3, hidden_size=64, heads=2, kv_heads=1)
    with pytest.raises(PublishError, match=r"unknown \['model.layers.2"):
        await publisher.publish(ModelWeights(deep), 1)
    await assert_serves(client, model, 0)


async def test_weights_that_are_not_finite_pause_nobody(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, model: Qwen2ForCausalLM
) -> None:
    weights = {n: t.clone() for n, t in ModelWeights(model)}
    weights["model.norm.weight"][3] = float("nan")
    with pytest.raises(PublishError, match=r"NaN or infinity, first model\.norm\.weight"):
        await publisher.publish(weights, 1)
    await assert_serves(client, model, 0)


async def test_versions_never_go_back_but_a_new_run_may_begin_anywhere(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, model: Qwen2ForCausalLM
) -> None:
    await publisher.publish(ModelWeights(model), 12)
    with pytest.raises(PublishError, match="version 11 is older than 12"):
        await publisher.publish(ModelWeights(model), 11)
    resumed = server_model(seed=3)
    await BroadcastPolicyPublisher(client).publish(ModelWeights(resumed), 10)
    await assert_serves(client, resumed, 10)


class TornPlane(SharedMemoryPlane):
    """Loses the end of the file on the way."""

    def prepare(self, weights: Mapping[str, Tensor]) -> Shipment:
        shipment = super().prepare(weights)
        path = Path(shipment.update["path"])
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size // 2)
        return shipment


class BentPlane(SharedMemoryPlane):
    """Changes one bit of one tensor on the way."""

    def prepare(self, weights: Mapping[str, Tensor]) -> Shipment:
        bent = {n: t.clone() for n, t in weights.items()}
        bent["model.norm.weight"].view(torch.int32)[5] ^= 1
        return super().prepare(bent)


@pytest.mark.parametrize(
    ("plane", "says"),
    [(TornPlane(), "was not published"), (BentPlane(), r"1 arrived changed \['model.norm.weight'")],
)
async def test_what_arrives_torn_or_bent_is_never_used(
    client: VLLMChatClient,
    publisher: BroadcastPolicyPublisher,
    model: Qwen2ForCausalLM,
    plane: Any,
    says: str,
) -> None:
    broken = BroadcastPolicyPublisher(client, plane=plane)
    running = asyncio.create_task(
        client.complete_tokens(request(max_tokens=480, seed=2, endless=True))
    )
    await until_in_flight(client.replicas[0], 1)
    with pytest.raises(PublishError, match=says):
        await broken.publish(ModelWeights(server_model(seed=9)), 1)
    trace = trace_of(await running)
    assert [s.version for s in trace.version_spans] == [0]
    assert largest_gap(scored(model, trace), trace.completion_logprobs) <= 1e-3
    await assert_serves(client, model, 0)
    await publisher.publish(ModelWeights(model), 1)


@pytest.mark.parametrize(("plane", "name"), [("gloo", "broadcast"), ("http", "http")])
async def test_a_plane_for_other_hosts_reaches_the_server_again_and_again(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, plane: Any, name: str
) -> None:
    by_name = BroadcastPolicyPublisher(client, plane=plane, **PATIENT)
    for version in (1, 2):
        newer = server_model(seed=version)
        report = await by_name.publish(ModelWeights(newer), version)
        assert report.details["plane"] == name
        await assert_serves(client, newer, version)
    assert not list(shared_folder().glob("ludic-publish-fetched-*"))


class HalfBroadcast(BroadcastPlane):
    """A trainer that fails after the first tensors."""

    def prepare(self, weights: Mapping[str, Tensor]) -> Shipment:
        shipment = super().prepare(weights)
        first = dict(list(weights.items())[:3])

        def move() -> None:
            assert self._group is not None
            for tensor in first.values():
                self._group.broadcast(tensor.contiguous())
            raise RuntimeError("the cable was cut")

        return Shipment(shipment.update, move, shipment.close)


async def test_a_broadcast_that_breaks_off_hangs_nobody(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, model: Qwen2ForCausalLM
) -> None:
    broken = BroadcastPolicyPublisher(client, plane=HalfBroadcast(backend="gloo"), timeout_s=15)
    with pytest.raises((PublishError, DeadlineError)):
        await broken.publish(ModelWeights(server_model(seed=9)), 1)
    await publisher.publish(ModelWeights(model), 2)
    await assert_serves(client, model, 2)


async def test_what_a_dead_trainer_left_open_is_closed(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher
) -> None:
    replica = client.replicas[0]
    for path in ("/pause?mode=keep", "/start_weight_update"):
        await client.control(replica, "POST", path, timeout_s=10)
    newer = server_model(seed=9)
    await BroadcastPolicyPublisher(client).publish(ModelWeights(newer), 1)
    await assert_serves(client, newer, 1)


async def test_a_lora_policy_is_published_merged_and_stays_itself(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher
) -> None:
    from peft import LoraConfig, get_peft_model

    base = server_model()
    policy = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    before = {n: p.clone() for n, p in policy.named_parameters()}
    for version in (1, 2):
        await publisher.publish(ModelWeights(policy), version)
    await assert_serves(client, policy, 2)
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())


async def test_a_client_s_sync_weights_goes_through_its_publisher(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher
) -> None:
    newer = server_model(seed=4)
    said = await client.sync_weights(dict(ModelWeights(newer)), version=3)
    assert said == "sent 26 tensors to 1 servers"
    await assert_serves(client, newer, 3)
