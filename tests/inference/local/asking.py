"""Short ways to ask for completions, and to check what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.types import ChatResponse

MODES: list[dict[str, Any]] = [
    {"deterministic": True},
    {"deterministic": False},
    {"deterministic": False, "pipelined": True},
]
"""Every way the engine can run on the CPU; the last is the GPU's, with plain calls for graphs."""


def request(
    prompt: Iterable[int],
    *,
    returns: ReturnSpec | None = None,
    timeout_s: float | None = 60.0,
    ignore_eos: bool = False,
    **sampling: Any,
) -> TokenCompletionRequest:
    return TokenCompletionRequest(
        "tiny",
        tuple(prompt),
        SamplingConfig(**sampling),
        returns or ReturnSpec(),
        timeout_s=timeout_s,
        extensions={"ignore_eos": ignore_eos},
    )


async def ask_all(
    client: LocalChatClient, requests: Iterable[TokenCompletionRequest], at_once: int = 1000
) -> list[ChatResponse]:
    """Answers in the order of the requests, with so many in flight at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(r: TokenCompletionRequest) -> ChatResponse:
        async with gate:
            return await client.complete_tokens(r)

    return list(await asyncio.gather(*(one(r) for r in requests)))


def plain_logprobs(model: Any, response: ChatResponse, temperature: float = 1.0) -> list[float]:
    """The completion's log-probs by one forward pass of the module, without any cache."""
    assert response.trace is not None
    ids, n = response.trace.token_ids, len(response.trace.prompt_token_ids)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    logp = torch.log_softmax(logits / temperature, -1)
    return [float(logp[i - 1, ids[i]]) for i in range(n, len(ids))]


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits until something is so; fails the test when it never is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        await asyncio.sleep(0.005)
