"""The engine against plain forward passes at the widths of published models; with `-s` each test
prints a row of a table."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ludic.errors import ConfigError
from ludic.inference import LocalChatClient
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local.build import engine_memory
from ludic.inference.local.gpu.fused_layer import FusedLayer
from ludic.inference.tiny import tiny_tokenizer
from ludic.plumbing.llama_layers import FAMILIES as FUSED
from ludic.types import ChatResponse
from tests.inference.local.asking import ask_all, request
from tests.inference.local.trained import FAMILIES, built

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

REAL = [name for name, family in FAMILIES.items() if family.shape]
SERVED = [name for name in REAL if not FAMILIES[name].refused]
WIDE = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
NEGLIGIBLE = {torch.bfloat16: 5e-3, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Strict float32, and the whole card for each test."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    gc.collect()
    torch.cuda.empty_cache()


def model_like(name: str, dtype: torch.dtype, **changes: Any) -> Any:
    family = FAMILIES[name]
    return built(family, {**family.shape, **changes}, "cuda").to(dtype)


def prompts(vocab: int, lengths: Sequence[int], new: int) -> list[TokenCompletionRequest]:
    rng = np.random.default_rng(0)
    return [
        request(rng.integers(3, vocab, n).tolist(), seed=n, max_tokens=new, ignore_eos=True)
        for n in lengths
    ]


def logprobs_of(answer: ChatResponse) -> Tensor:
    assert answer.trace is not None
    assert answer.trace.completion_logprobs is not None
    return torch.tensor(answer.trace.completion_logprobs, dtype=torch.float64)


AT_ONCE = 12_288
"""Tokens of a plain forward pass."""


@torch.no_grad()
def plain(model: Any, answer: ChatResponse) -> Tensor:
    """The completion's log-probs by the module itself: in one forward pass, or for a long prompt in
    a few with its own cache, since some of torch's kernels hold every score at once."""
    assert answer.trace is not None
    ids = torch.tensor([answer.trace.token_ids], device="cuda")
    new = len(answer.trace.completion_token_ids)
    cache = None
    while ids.shape[1] - (done := cache.get_seq_length() if cache else 0) > AT_ONCE + new:
        part = ids[:, done : done + AT_ONCE]
        cache = model(input_ids=part, past_key_values=cache, use_cache=True).past_key_values
    last = model(
        input_ids=ids[:, done:], past_key_values=cache, use_cache=cache is not None,
        logits_to_keep=new + 1,
    )  # fmt: skip
    logits = last.logits[0, :-1]
    logp = logits.double().log_softmax(-1).gather(1, ids[0, -new:, None])
    wanted: Tensor = logp[:, 0].cpu()
    return wanted


class Gaps(NamedTuple):
    """Distances from the wide pass: root mean squares, and the engine's largest."""

    engine: float
    module: float
    largest: float


def gaps(model: Any, answers: Sequence[ChatResponse], dtype: torch.dtype) -> Gaps:
    """Leaves the model in the wide type."""
    own = torch.cat([plain(model, a) for a in answers])
    model.to(WIDE[dtype])
    exact = torch.cat([plain(model, a) for a in answers])
    seen = torch.cat([logprobs_of(a) for a in answers])

    def size(of: Tensor) -> float:
        return float(of.square().mean().sqrt())

    return Gaps(size(seen - exact), size(own - exact), float((seen - exact).abs().max()))


def check(name: str, found: Gaps, dtype: torch.dtype, note: str = "") -> None:
    print(
        f"\n| {name} | {str(dtype)[6:]} | engine {found.engine:.2g} | module {found.module:.2g} | "
        f"largest {found.largest:.2g} | {note} |"
    )
    assert math.isfinite(found.engine)
    assert found.engine <= 2 * found.module + NEGLIGIBLE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SERVED)
async def test_a_family_gives_the_logprobs_of_a_plain_pass(name: str, dtype: torch.dtype) -> None:
    model = model_like(name, dtype)
    window = FAMILIES[name].shape.get("sliding_window", 100)
    # One prompt stays within the window and its completion leaves it; one is longer.
    asks = prompts(model.config.vocab_size, [3, 17, 90, 91, 260, window - 8, window + 50], 24)
    options: Any = {"max_slots": 32, "max_context_tokens": window + 384}
    async with LocalChatClient(model, tiny_tokenizer(), **options) as client:
        batch = client._scheduler.batch  # type: ignore[attr-defined]
        fused = sum(type(m) is FusedLayer for m in batch.forward.view.modules())
        answers = await ask_all(client, asks)
        captured = len(batch.graphs)
    assert captured > 0
    if batch.kernels is not None:
        assert fused == (2 if model.config.model_type in FUSED else 0)
    note = f"{fused} layers fused, {captured} graphs, kernels {batch.kernels is not None}"
    check(f"{name} ({FAMILIES[name].like})", gaps(model, answers, dtype), dtype, note)


@pytest.mark.parametrize("name", [name for name in REAL if FAMILIES[name].refused])
def test_a_family_is_refused_with_its_reason(name: str) -> None:
    model = model_like(name, torch.bfloat16)
    with pytest.raises(ConfigError, match=FAMILIES[name].refused) as raised:
        LocalChatClient(model, tiny_tokenizer())
    print(f"\n| {name} ({FAMILIES[name].like}) | refused: {raised.value} |")


HALF_BILLION: dict[str, Any] = {"num_hidden_layers": 24, "max_position_embeddings": 40960}


@pytest.mark.parametrize("length", [8192, 32768])
async def test_a_long_prompt_and_the_turn_after_it(length: int) -> None:
    model = model_like("qwen2", torch.bfloat16, **HALF_BILLION)
    (ask,) = prompts(model.config.vocab_size, [length], 16)
    options: Any = {"max_slots": 4, "max_context_tokens": length + 1024}
    async with LocalChatClient(model, tiny_tokenizer(), **options) as client:
        first = await client.complete_tokens(ask)
        assert first.trace is not None
        again = request([*first.trace.token_ids, *range(5, 205)], seed=1, max_tokens=16)
        second = await client.complete_tokens(again)
        assert client.stats()["reused_tokens"] >= length
    found = gaps(model, [first, second], torch.bfloat16)
    check(f"qwen2, 0.5B, prompt of {length}", found, torch.bfloat16)


async def test_a_long_prompt_within_a_window() -> None:
    model = model_like("mistral", torch.bfloat16, max_position_embeddings=16384)
    asks = prompts(model.config.vocab_size, [12000], 16)
    options: Any = {"max_slots": 4, "max_context_tokens": 12288}
    async with LocalChatClient(model, tiny_tokenizer(), **options) as client:
        answers = await ask_all(client, asks)
    check("mistral, prompt of 12000", gaps(model, answers, torch.bfloat16), torch.bfloat16)


async def test_512_slots_at_once_within_the_memory_that_was_foretold() -> None:
    model = model_like("qwen2", torch.bfloat16, **HALF_BILLION)
    asks = prompts(model.config.vocab_size, range(40, 552), 32)
    options: Any = {"max_slots": 512, "max_context_tokens": 640}
    foretold = engine_memory(model, **options)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    async with LocalChatClient(model, tiny_tokenizer(), **options) as client:
        answers = await ask_all(client, asks)
    taken = torch.cuda.max_memory_allocated() - before
    held = torch.cuda.max_memory_reserved() - before
    gib = 2**30
    note = (
        f"{taken / gib:.2f} GiB taken, {held / gib:.2f} held by the allocator, "
        f"{foretold.total / gib:.2f} foretold"
    )
    found = gaps(model, answers[::32], torch.bfloat16)
    check("qwen2, 0.5B, 512 slots", found, torch.bfloat16, note)
    assert foretold.slots <= taken <= foretold.total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
async def test_an_adapter_is_part_of_what_is_sampled_from(name: str, dtype: torch.dtype) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    )
    model = peft.get_peft_model(model_like(name, dtype), adapter).to(dtype).eval()
    noise = torch.Generator("cuda").manual_seed(3)
    with torch.no_grad():
        for part, p in model.named_parameters():
            if "lora_B" in part:
                p.normal_(0.0, 0.3, generator=noise)
    asks = prompts(model.config.vocab_size, [5, 70, 200], 24)
    options: Any = {"max_slots": 16, "max_context_tokens": 512}
    async with LocalChatClient(model, tiny_tokenizer(), **options) as client:
        answers = await ask_all(client, asks)
    with model.disable_adapter():
        without = torch.cat([plain(model, a) for a in answers])
    found = gaps(model, answers, dtype)
    seen = torch.cat([logprobs_of(a) for a in answers])
    assert float((seen - without).square().mean().sqrt()) > 10 * found.engine
    check(f"{name} with LoRA", found, dtype)
