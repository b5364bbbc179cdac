"""Publishing LoRA adapters to a real vLLM server while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from ludic.distributed import AdapterPolicyPublisher, AdapterWeights, ModelWeights
from ludic.errors import ConfigError, PublishError, RequestRejectedError
from ludic.inference.sampling import ReturnSpec
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import VLLMServer
from ludic.runs.doctor import run_doctor
from ludic.runs.playing import open_policy
from ludic.runs.settings import check_run
from ludic.types import TokenTrace
from tests.inference.vllm.asking import (
    PATIENT,
    largest_gap,
    request,
    scored,
    trace_of,
    until_in_flight,
)
from tests.inference.vllm.conftest import NAME, server_model, tiny_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

MAX_RANK, MAX_LORAS = 8, 2


def model_with_a_head(seed: int = 0) -> Qwen2ForCausalLM:
    """The tiny model with an output head of its own, which vLLM wraps for adapters; a tied one it
    leaves alone."""
    config = server_model().config
    config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).float().eval()


def policy(seed: int, base: int = 0, **lora: Any) -> nn.Module:
    """The server's model with an adapter that changes every log-prob."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora}
    found: nn.Module = get_peft_model(model_with_a_head(base), LoraConfig(**settings))
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2, generator=noise)
    return found.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    found = tmp_path_factory.mktemp("tiny-with-a-head")
    model_with_a_head().save_pretrained(found)
    tokenizer.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def lora_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """Takes adapters; known by its short name, and by its folder as a run file names it."""
    server = tiny_server(
        folder,
        tmp_path_factory.mktemp("logs") / "lora.log",
        max_lora_rank=MAX_RANK,
        max_loras=MAX_LORAS,
        extra=("--served-model-name", NAME, str(folder)),
    )
    with server:
        yield server


@pytest.fixture
async def lora_client(lora_server: VLLMServer) -> AsyncIterator[VLLMChatClient]:
    async with VLLMChatClient(lora_server.url, model=NAME) as found:
        yield found


@pytest.fixture
async def publisher(lora_client: VLLMChatClient) -> AsyncIterator[AdapterPolicyPublisher]:
    found = AdapterPolicyPublisher(lora_client, **PATIENT)
    yield found
    await found.close()
    assert not found.folders.path.exists()


async def assert_serves(client: VLLMChatClient, model: nn.Module, version: int) -> TokenTrace:
    """The server has this version's adapter and this model's log-probs."""
    assert await client.get_policy_version() == version
    trace = trace_of(await client.complete_tokens(request(max_tokens=8)))
    assert [(s.start, s.end, s.version) for s in trace.version_spans] == [
        (0, len(trace.completion_token_ids), version)
    ]
    assert largest_gap(scored(model, trace), trace.completion_logprobs) <= 1e-3
    return trace


async def named(client: VLLMChatClient) -> list[str]:
    """The adapters that requests to the server can name."""
    answer = await client.control(client.replicas[0], "GET", "/v1/models", timeout_s=10)
    return [card["id"] for card in answer["data"] if card["parent"]]


async def held(client: VLLMChatClient) -> int:
    """How many adapters the worker itself holds."""
    body = {"method": "list_loras"}
    answer = await client.control(
        client.replicas[0], "POST", "/collective_rpc", body=body, timeout_s=10
    )
    return len(answer["results"][0])


async def test_an_adapter_changes_what_the_server_samples_from(
    lora_client: VLLMChatClient, publisher: AdapterPolicyPublisher
) -> None:
    first, second = policy(1), policy(2)
    report = await publisher.publish(ModelWeights(first), 7)
    assert report.verified
    assert report.details["receipts"]
    assert report.details["canary_max"] <= 1e-3
    trained = sum(p.numel() for p in first.parameters() if p.requires_grad)
    assert report.bytes == 4 * trained
    before = await assert_serves(lora_client, first, 7)
    await publisher.publish(ModelWeights(second), 8)
    after = await assert_serves(lora_client, second, 8)
    # The same prompt and seed.
    assert before.completion_token_ids != after.completion_token_ids
    assert largest_gap(scored(first, after), after.completion_logprobs) > 0.01


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 8, "down_proj": 2}, "alpha_pattern": {"k_proj": 1}},
        {"target_modules": ["v_proj"], "lora_alpha": 3, "r": 7},
    ],
    ids=["rslora", "patterns", "one module"],
)
async def test_other_ranks_and_scalings_arrive_as_they_are(
    lora_client: VLLMChatClient, publisher: AdapterPolicyPublisher, lora: dict[str, Any]
) -> None:
    model = policy(3, **lora)
    await publisher.publish(ModelWeights(model), 1)
    await assert_serves(lora_client, model, 1)


async def test_a_publish_over_sixteen_running_requests_loses_none_and_each_has_one_version(
    lora_client: VLLMChatClient, publisher: AdapterPolicyPublisher
) -> None:
    models = {1: policy(1), 2: policy(2)}
    await publisher.publish(ModelWeights(models[1]), 1)
    published = asyncio.Event()

    async def ask_on_and_on(n: int) -> list[TokenTrace]:
        traces: list[TokenTrace] = []
        last = False
        while not last:
            last = published.is_set()
            asked = request(range(30 + n, 50 + n), max_tokens=80, seed=len(traces), endless=True)
            traces.append(trace_of(await lora_client.complete_tokens(asked)))
        return traces

    tasks = [asyncio.create_task(ask_on_and_on(n)) for n in range(16)]
    await until_in_flight(lora_client.replicas[0], 16)
    await publisher.publish(ModelWeights(models[2]), 2)
    published.set()
    traces = [trace for task in tasks for trace in await task]
    versions = [[s.version for s in trace.version_spans] for trace in traces]
    assert versions.count([1]) >= 16
    assert versions.count([2]) >= 16
    assert all(found in ([1], [2]) for found in versions)
    for trace, (version,) in zip(traces, versions, strict=True):
        assert len(trace.completion_token_ids) == 80
        assert largest_gap(scored(models[version], trace), trace.completion_logprobs) <= 1e-3
    assert lora_client.retries == 0
    await until_only(lora_client, publisher, 2)


async def test_prompt_log_probs_are_refused_where_they_could_end_the_engine(
    lora_client: VLLMChatClient, publisher: AdapterPolicyPublisher
) -> None:
    await publisher.publish(ModelWeights(policy(1)), 1)
    with pytest.raises(RequestRejectedError, match="prompt log-probs can end the engine"):
        await lora_client.complete_tokens(request(returns=ReturnSpec(prompt_logprobs=True)))


async def until_only(client: VLLMChatClient, publisher: AdapterPolicyPublisher, n: int) -> None:
    """Waits until every adapter but that of version `n` is unloaded."""
    async with asyncio.timeout(600):
        while [f"{NAME}@{n}-" in name for name in await named(client)] != [True]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await held(client) <= MAX_LORAS
    assert len([p for p in publisher.folders.path.iterdir() if p.is_dir()]) <= MAX_LORAS + 1


async def test_twelve_versions_in_a_row_leave_one(
    lora_client: VLLMChatClient, publisher: AdapterPolicyPublisher
) -> None:
    model = policy(5)
    for version in range(1, 13):
        await publisher.publish(ModelWeights(model), version)
        assert await held(lora_client) <= MAX_LORAS
    await until_only(lora_client, publisher, 12)


class Changed:
    """Writes other tensors than it was given, as a faulty disk would."""

    def __init__(self, publisher: AdapterPolicyPublisher) -> None:
        self.write = publisher.folders.write

    def __call__(self, name: str, tensors: Mapping[str, Tensor], config: Any) -> Path:
        first = next(iter(tensors))
        return self.write(name, {**tensors, first: tensors[first] + 1e-6}, config)


async def test_what_is_wrong_is_refused_and_the_version_before_stays(
    lora_client: VLLMChatClient,
    publisher: AdapterPolicyPublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = policy(1)
    await publisher.publish(ModelWeights(model), 1)

    broken = policy(2)
    with torch.no_grad():
        next(p for n, p in broken.named_parameters() if "lora_A" in n)[0, 0] = float("nan")
    with pytest.raises(PublishError, match="NaN or infinity"):
        await publisher.publish(ModelWeights(broken), 2)

    with pytest.raises(ConfigError, match=r"rank 16.*takes up to 8.*--max-lora-rank 16"):
        await publisher.publish(ModelWeights(policy(2, r=16)), 2)

    # The tensors arrive, but the weights below them are not the trainer's.
    with pytest.raises(PublishError, match="the same weights below the adapter"):
        await publisher.publish(ModelWeights(policy(2, base=9)), 2)

    with monkeypatch.context() as patched:
        patched.setattr(publisher.folders, "write", Changed(publisher))
        with pytest.raises(PublishError, match="1 of the adapter's tensors are not as they were"):
            await publisher.publish(ModelWeights(policy(2)), 2)

    assert len(await named(lora_client)) == 1
    await assert_serves(lora_client, model, 1)
    await publisher.publish(ModelWeights(policy(2)), 2)
    await assert_serves(lora_client, policy(2), 2)


async def test_a_server_without_the_flags_says_which(client: VLLMChatClient) -> None:
    publisher = AdapterPolicyPublisher(client)
    with pytest.raises(ConfigError, match=r"ludic serve --max-lora-rank 4"):
        await publisher.publish(ModelWeights(policy(1)), 1)
    await publisher.close()


async def test_a_server_that_lost_its_adapter_gets_it_back_before_it_is_used(
    lora_client: VLLMChatClient, publisher: AdapterPolicyPublisher
) -> None:
    model = policy(4)
    await publisher.publish(ModelWeights(model), 3)
    for name in await named(lora_client):
        await lora_client.control(
            lora_client.replicas[0],
            "POST",
            "/v1/unload_lora_adapter",
            body={"lora_name": name},
            plain=True,
        )
    trace = trace_of(await lora_client.complete_tokens(request()))
    assert [s.version for s in trace.version_spans] == [3]
    assert largest_gap(scored(model, trace), trace.completion_logprobs) <= 1e-3
    assert lora_client.retries > 0


async def test_a_resumed_run_s_adapter_comes_first_and_versions_never_go_back(
    lora_client: VLLMChatClient, publisher: AdapterPolicyPublisher
) -> None:
    await publisher.publish(ModelWeights(policy(1)), 30)
    publisher.folders.close()  # the trainer died: nobody holds its folder, and nobody unloads
    resumed = AdapterPolicyPublisher(lora_client, **PATIENT)
    await resumed.publish(ModelWeights(policy(6)), 20)
    await assert_serves(lora_client, policy(6), 20)
    with pytest.raises(PublishError, match="never go back"):
        await resumed.publish(ModelWeights(policy(6)), 19)
    said = await lora_client.sync_weights(dict(AdapterWeights(policy(7))), version=21)
    assert said == "sent 28 tensors to 1 servers"
    await assert_serves(lora_client, policy(7), 21)
    await until_only(lora_client, resumed, 21)
    await resumed.close()


async def test_a_run_file_publishes_the_adapter_and_the_doctor_finds_nothing(
    lora_server: VLLMServer, folder: Path
) -> None:
    config = check_run(
        {
            "env": {"kind": "tic_tac_toe"},
            "model": {"name": str(folder), "dtype": "float32", "lora": {"rank": 4}},
            "inference": {
                "backend": "vllm",
                "servers": [lora_server.url],
                "publish_lora": "adapter",
            },
        }
    )
    async with open_policy(config) as opened:
        report = await run_doctor(
            opened.model,
            opened.tokenizer,
            opened.runtime.client,
            model_name=opened.runtime.model,
            publisher=opened.publisher,
            requests=4,
            max_tokens=8,
        )
    assert report.ok, report.table()
    assert max(row.max for row in report.rows if not row.note) <= 1e-3
