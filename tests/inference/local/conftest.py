"""A tiny model, a tokenizer, and short ways to ask for completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.types import ChatResponse


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Any:
    """The promise of equal bits is for one number of threads; this is the one of these tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def model() -> Any:
    return tiny_model()


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
