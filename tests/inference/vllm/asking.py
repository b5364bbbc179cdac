"""Short ways to ask for completions, and to score them as a trainer would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import torch

from ludic.distributed.publisher import PublishSettings
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.rotation import Replica
from ludic.types import ChatResponse, TokenTrace

PROMPT = tuple(range(60, 80))
PATIENT = PublishSettings(timeout_s=900.0, patience_s=300.0)
"""For publishers to real servers: no slow machine is to be taken for one that hangs."""


def request(
    prompt: Sequence[int] = PROMPT,
    *,
    max_tokens: int | None = 8,
    seed: int | None = 1,
    conversation: str | None = None,
    timeout_s: float | None = 1800.0,
    returns: ReturnSpec | None = None,
    endless: bool = False,
    **sampling: Any,
) -> TokenCompletionRequest:
    return TokenCompletionRequest(
        "tiny",
        tuple(prompt),
        SamplingConfig(max_tokens=max_tokens, seed=seed, **sampling),
        returns or ReturnSpec(),
        conversation_id=conversation,
        timeout_s=timeout_s,
        extensions={"ignore_eos": True} if endless else {},
    )


@torch.no_grad()
def scored(model: torch.nn.Module, trace: TokenTrace, temperature: float = 1.0) -> list[float]:
    """The log-probs of the completion under `model`, in one plain forward pass."""
    ids = torch.tensor([trace.token_ids])
    logits = model(input_ids=ids).logits[0].float() / temperature
    start = len(trace.prompt_token_ids)
    rows = logits[start - 1 : -1].log_softmax(-1)
    return [float(v) for v in rows.gather(-1, ids[0, start:, None])[:, 0]]


async def running(url: str) -> int:
    """How many requests the server itself says that it is working on."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    counts = [line for line in lines if line.startswith("vllm:num_requests_running")]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in counts))


async def until_idle(url: str, seconds: float = 600.0) -> None:
    """Waits until the server works on nothing."""
    deadline = time.monotonic() + seconds
    found = -1
    while time.monotonic() < deadline:
        found = await running(url)
        if found == 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{url} still works on {found} requests")


async def until_in_flight(replica: Replica, wanted: int, seconds: float = 600.0) -> None:
    """Waits until the client has given a server so many requests, and it works on them."""
    async with asyncio.timeout(seconds):
        while replica.in_flight < wanted or not await running(replica.url):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def trace_of(response: ChatResponse) -> TokenTrace:
    assert response.trace is not None
    return response.trace


def largest_gap(ours: Sequence[float], theirs: Sequence[float] | None) -> float:
    assert theirs is not None
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


async def tell(client: VLLMChatClient, replica: Replica, method: str, *args: int) -> Any:
    """Calls a method of `failing_worker` on the workers of a server."""
    body = {"method": method, "args": list(args)}
    return await client.control(replica, "POST", "/collective_rpc", body=body, timeout_s=30)


async def assert_serves(client: VLLMChatClient, replica: Replica, model: Any, version: int) -> None:
    """This very server has this version's name and this model's log-probs."""
    assert await client.replica_version(replica) == version
    trace = trace_of(await client.ask_replica(replica, request()))
    assert {span.version for span in trace.version_spans} == {version}
    assert largest_gap(scored(model, trace), trace.completion_logprobs) <= 1e-3
