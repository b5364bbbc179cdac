"""`VLLMChatClient` against a real vLLM server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from transformers import Qwen2ForCausalLM

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.errors import ConfigError, DeadlineError, InferenceError, RequestRejectedError
from ludic.inference.sampling import ReturnSpec
from ludic.inference.tiny import tiny_tokenizer
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import VLLMServer, free_port
from ludic.inference.vllm.wire import VLLMExtensions
from ludic.types import FinishReason
from tests.inference.vllm.asking import (
    PROMPT,
    largest_gap,
    request,
    scored,
    trace_of,
    until_idle,
    until_in_flight,
)
from tests.inference.vllm.conftest import NAME, tiny_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]


async def test_tokens_go_in_and_come_out_with_log_probs(client: VLLMChatClient) -> None:
    response = await client.complete_tokens(request(max_tokens=8))
    trace = trace_of(response)
    assert trace.prompt_token_ids == PROMPT
    assert 1 <= len(trace.completion_token_ids) <= 8
    assert trace.completion_logprobs is not None
    assert trace.version_spans[0].start == 0
    assert trace.version_spans[-1].end == len(trace.completion_token_ids)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_its_log_probs_are_the_trainers(
    client: VLLMChatClient,
    publisher: BroadcastPolicyPublisher,
    model: Qwen2ForCausalLM,
    temperature: float,
) -> None:
    requests = [
        request(range(40 + n, 60 + 2 * n), max_tokens=24, seed=n, temperature=temperature)
        for n in range(8)
    ]
    responses = await asyncio.gather(*map(client.complete_tokens, requests))
    for response in responses:
        trace = trace_of(response)
        assert largest_gap(scored(model, trace, temperature), trace.completion_logprobs) <= 1e-3


async def test_truncated_sampling_reports_the_renormalised_distribution(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, model: Qwen2ForCausalLM
) -> None:
    trace = trace_of(await client.complete_tokens(request(max_tokens=1, top_k=3)))
    logits = model(input_ids=torch.tensor([PROMPT])).logits[0, -1].detach().float()
    best = logits.topk(3)
    place = best.indices.tolist().index(trace.completion_token_ids[0])
    expected = float(best.values.log_softmax(-1)[place])
    assert trace.completion_logprobs == pytest.approx([expected], abs=1e-3)


async def test_prompt_log_probs_are_the_models(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, model: Qwen2ForCausalLM
) -> None:
    returns = ReturnSpec(prompt_logprobs=True)
    found = (await client.complete_tokens(request(returns=returns))).info["prompt_logprobs"]
    rows = model(input_ids=torch.tensor([PROMPT])).logits[0, :-1].float().log_softmax(-1)
    expected = rows.gather(-1, torch.tensor(PROMPT)[1:, None])[:, 0].tolist()
    assert found[0] is None
    assert found[1:] == pytest.approx(expected, abs=1e-3)


async def test_the_same_seed_samples_the_same_tokens(client: VLLMChatClient) -> None:
    first, second = [await client.complete_tokens(request(seed=5)) for _ in range(2)]
    other = await client.complete_tokens(request(seed=6))
    assert trace_of(first).completion_token_ids == trace_of(second).completion_token_ids
    assert trace_of(first).completion_token_ids != trace_of(other).completion_token_ids


async def test_a_stop_id_ends_the_completion_and_stays_in_it(client: VLLMChatClient) -> None:
    whole = trace_of(await client.complete_tokens(request(max_tokens=6))).completion_token_ids
    stopped = await client.complete_tokens(request(max_tokens=6, stop_token_ids=(whole[2],)))
    assert trace_of(stopped).completion_token_ids == whole[:3]
    assert stopped.finish_reason is FinishReason.STOP
    # The same through the field for whatever only vLLM knows.
    extensions = VLLMExtensions(extra_body_overrides={"stop_token_ids": [whole[2]]}).to_mapping()
    again = await client.complete_tokens(
        structs.replace(request(max_tokens=6), extensions=extensions)
    )
    assert trace_of(again).completion_token_ids == whole[:3]


async def test_without_a_limit_a_completion_fills_the_context(client: VLLMChatClient) -> None:
    prompt = [65] * 480
    response = await client.complete_tokens(request(prompt, max_tokens=None, endless=True))
    assert len(trace_of(response).completion_token_ids) == 512 - 480
    assert response.finish_reason is FinishReason.LENGTH


async def test_many_long_seeded_prompts_at_once_are_all_served(client: VLLMChatClient) -> None:
    # More than one step's worth of prompt tokens: in parts, they would end the CPU engine.
    asked = [request([65 + n] * 450, max_tokens=2, seed=n) for n in range(12)]
    responses = await asyncio.gather(*map(client.complete_tokens, asked))
    assert all(trace_of(r).completion_logprobs for r in responses)


async def test_bad_requests_are_refused_one_by_one_while_others_are_served(
    client: VLLMChatClient,
) -> None:
    bad = [request([10**6]), request([65] * 600), request([]), request(timeout_s=0)]
    good = [request(seed=n) for n in range(4)]
    results = await asyncio.gather(
        *map(client.complete_tokens, [*bad, *good]), return_exceptions=True
    )
    assert all(isinstance(r, RequestRejectedError) for r in results[:4])
    assert "vocabulary" in str(results[0])
    assert "max_model_len=512" in str(results[1])
    assert not any(isinstance(r, BaseException) for r in results[4:])


async def test_a_deadline_ends_a_request_and_frees_the_server(
    client: VLLMChatClient, server: VLLMServer
) -> None:
    with pytest.raises(DeadlineError, match="a completion"):
        await client.complete_tokens(request(max_tokens=400, endless=True, timeout_s=0.05))
    await until_idle(client.replicas[0].url)


async def test_a_cancelled_request_ends_on_the_server(client: VLLMChatClient) -> None:
    tasks = [
        asyncio.create_task(client.complete_tokens(request(max_tokens=480, seed=n, endless=True)))
        for n in range(4)
    ]
    await until_in_flight(client.replicas[0], 4)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results)
    await until_idle(client.replicas[0].url)
    assert trace_of(await client.complete_tokens(request())).completion_token_ids


async def test_the_older_route_gives_the_same_tokens(client: VLLMChatClient) -> None:
    asked = [request(max_tokens=6, seed=3), request(max_tokens=3, returns=ReturnSpec(False))]
    newer = [await client.complete_tokens(r) for r in asked]
    facts = client.replicas[0].facts
    assert facts is not None
    assert facts.generates
    client.replicas[0].facts = replace(facts, generates=False)
    older = [await client.complete_tokens(r) for r in asked]
    for old, new in zip(older, newer, strict=True):
        assert trace_of(old).completion_token_ids == trace_of(new).completion_token_ids
        assert trace_of(old).version_spans[0].version == client.version
    ours = trace_of(newer[0]).completion_logprobs
    assert ours is not None
    assert largest_gap(ours, trace_of(older[0]).completion_logprobs) <= 1e-3


async def test_a_wrong_model_name_says_which_are_served(server: VLLMServer) -> None:
    client = VLLMChatClient(server.url, model="another")
    with pytest.raises(ConfigError, match=f"serves \\['{NAME}'\\], not 'another'"):
        await client.connect()
    await client.close()


async def test_a_tokenizer_of_another_model_is_told(client: VLLMChatClient) -> None:
    await client.connect(tokenizer=tiny_tokenizer())
    with pytest.raises(ConfigError, match="tokenizer does not fit"):
        await client.connect(tokenizer=tiny_tokenizer(["Tokenizers"]))


async def test_nobody_at_the_address_is_said_at_once() -> None:
    client = VLLMChatClient(f"http://127.0.0.1:{free_port()}", max_retries=0)
    with pytest.raises(InferenceError, match="no vLLM server answers"):
        await client.connect()
    with pytest.raises(InferenceError, match="no server could serve"):
        await client.complete_tokens(request())
    await client.close()


def test_a_server_that_cannot_start_says_why(model_folder: Path, tmp_path: Path) -> None:
    server = tiny_server(model_folder, tmp_path / "log", dtype="float1")
    with pytest.raises(InferenceError, match="float1"), server:
        pass
    assert server.process is None
