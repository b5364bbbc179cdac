"""Families of models beside Qwen2, and the real SmolLM2."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.inference.local import LocalChatClient
from tests.inference.local.asking import ask_all, plain_logprobs, request

SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def family(name: str, **changes: Any) -> Any:
    import transformers

    options = SIZES | changes
    if name == "GPT2":
        options = {"vocab_size": 258, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        options |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if name == "Qwen3":
        options["head_dim"] = 16
    if name == "Mistral":
        options.setdefault("sliding_window", 24)
    config = getattr(transformers, f"{name}Config")(**options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(
            config
        ).eval()


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "GPT2"])
@pytest.mark.parametrize(
    "mode", [{}, {"deterministic": False}, {"deterministic": False, "pipelined": True}]
)
async def test_a_family_gives_the_logprobs_of_its_own_forward_pass(
    tokenizer: Any, name: str, mode: Any
) -> None:
    model = family(name)
    rng = random.Random(0)
    asks = [
        request([rng.randrange(258) for _ in range(rng.randrange(1, 90))], seed=i, max_tokens=40)
        for i in range(8)
    ]
    async with LocalChatClient(model, tokenizer, **mode) as client:
        answers = await ask_all(client, asks)
    for answer in answers:
        assert answer.trace is not None
        assert answer.trace.completion_logprobs == pytest.approx(
            plain_logprobs(model, answer), abs=2e-5
        )


async def test_a_prompt_wider_than_its_slot_once_padded_is_computed_within_a_window(
    tokenizer: Any,
) -> None:
    model = family("Mistral")
    options: Any = {"deterministic": False, "pipelined": True, "max_context_tokens": 192}
    async with LocalChatClient(model, tokenizer, **options) as client:
        answer = await client.complete_tokens(request(range(40, 190), seed=0, max_tokens=5))
    assert answer.trace is not None
    assert answer.trace.completion_logprobs == pytest.approx(
        plain_logprobs(model, answer), abs=2e-5
    )


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(1800)  # a CPU without bfloat16 takes five seconds for a token
async def test_smollm2_is_served_in_bfloat16(smollm2_path: Path, smollm2_tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16).eval()
    ask = request(smollm2_tokenizer.encode("Two and two"), seed=0, max_tokens=2, timeout_s=900)
    options: Any = {"deterministic": False, "max_context_tokens": 64}
    async with LocalChatClient(model, smollm2_tokenizer, **options) as client:
        answer = await client.complete_tokens(ask)
    assert answer.trace is not None
    exact = plain_logprobs(model.float(), answer)
    assert answer.trace.completion_logprobs == pytest.approx(exact, abs=0.5)


@pytest.mark.integration
@pytest.mark.slow
async def test_smollm2_gives_the_logprobs_of_a_plain_pass_and_the_same_bits_in_a_crowd(
    smollm2_path: Path, smollm2_tokenizer: Any
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    questions = ["What is 2 + 3?", "Name a colour.", "Count to five.", "Say hello."]
    asks = []
    for i, question in enumerate(questions):
        text = smollm2_tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        asks.append(request(smollm2_tokenizer.encode(text), seed=i, max_tokens=16, timeout_s=300))
    async with LocalChatClient(model, smollm2_tokenizer, max_context_tokens=256) as client:
        crowd = await ask_all(client, asks)
        alone = await client.complete_tokens(asks[0])
    assert alone.trace == crowd[0].trace
    for answer in crowd:
        assert answer.trace is not None
        assert answer.trace.completion_logprobs == pytest.approx(
            plain_logprobs(model, answer), abs=1e-4
        )
