"""What a slot leaves behind, who gets the rows of a step, and what is refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from ludic.errors import ConfigError, RequestRejectedError
from ludic.inference.local import LocalChatClient
from ludic.inference.local.arena import SlotMemory
from ludic.inference.tiny import tiny_model
from tests.inference.local import by_hand
from tests.inference.local.asking import request, until


async def test_a_broken_prompt_that_is_cancelled_before_its_end_leaves_a_clean_slot(
    tokenizer: Any,
) -> None:
    model = tiny_model()
    model.config.tie_word_embeddings = False
    head = torch.nn.Linear(64, 258, bias=False)
    head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.lm_head = head
    with torch.no_grad():
        model.model.embed_tokens.weight[200] = float("nan")
    async with LocalChatClient(model, tokenizer, max_slots=2, step_rows=64) as client:
        scheduler: Any = client._scheduler
        compute = scheduler.compute

        def gives_up_before_the_end(work: Any) -> Any:
            outcomes = compute(work)
            if work[0].sequence.computed >= 768:
                del scheduler.compute, scheduler.decode_step
                work[0].sequence.cancelled = True
            return outcomes

        scheduler.compute, scheduler.decode_step = gives_up_before_the_end, lambda work: None
        broken = asyncio.create_task(
            client.complete_tokens(request([7] * 20 + [200] + [9] * 900, max_tokens=2, seed=0))
        )
        await until(lambda: client.stats()["cancelled"] == 1)
        broken.cancel()
        clean = await client.complete_tokens(request([7] * 600, max_tokens=2, seed=0))
    assert clean.trace is not None


def test_prompts_and_decoders_share_steps_that_are_too_small_for_all() -> None:
    scheduler = by_hand.scheduler(step_rows=4, max_slots=8)
    decoders = [by_hand.sequence([i], 500) for i in range(5)]
    scheduler.waiting.extend(decoders)
    scheduler.advance()
    scheduler.advance()
    for _ in range(20):
        answered: list[Any] = []
        scheduler.waiting.append(by_hand.sequence([100, 101, 102], 1, answered))
        for _ in range(3):
            assert not answered
            scheduler.advance()
        assert len(answered) == 1
        done = [s.generated for s in decoders]
        assert max(done) - min(done) <= 1
    assert min(s.generated for s in decoders) > 20


def test_statistics_may_be_asked_while_an_arena_is_added() -> None:
    memory = SlotMemory(by_hand.SHAPE, max_slots=2, max_tokens=1024)
    sequences: list[Any] = [by_hand.sequence([1], 1) for _ in range(2)]
    for s, tokens in zip(sequences, (1, 100), strict=True):
        memory.place(s, tokens)

    class Meanwhile(list[Any]):
        """Another thread's arena, in the middle of the count."""

        def __len__(self) -> int:
            memory.arena(1024)
            return super().__len__()

    arena = memory.arena(64)
    arena.tenants = Meanwhile(arena.tenants)
    assert memory.taken == 2

    class Tensor:
        def __init__(self, kv: torch.Tensor) -> None:
            self.kv = kv

        def numel(self) -> int:
            memory.arena(512)
            return self.kv.numel()

        def element_size(self) -> int:
            return self.kv.element_size()

    arena.kv = Tensor(arena.kv)  # type: ignore[assignment]
    assert memory.bytes > 0


async def test_a_token_id_of_another_type_is_called_so(model: Any, tokenizer: Any) -> None:
    prompt: Any = [1, np.int64(5)]
    async with LocalChatClient(model, tokenizer) as client:
        with pytest.raises(RequestRejectedError, match=r"\[1\].*type int64: give plain ints"):
            await client.complete_tokens(request(prompt, max_tokens=1))


@pytest.mark.parametrize("wrong", [-1, 258, 1 << 40])
async def test_a_token_id_outside_of_the_vocabulary_is_refused(
    model: Any, tokenizer: Any, wrong: int
) -> None:
    async with LocalChatClient(model, tokenizer) as client:
        with pytest.raises(RequestRejectedError, match=rf"\[1\] = {wrong} is outside"):
            await client.complete_tokens(request([1, wrong, 2], max_tokens=1))


async def test_dropout_that_a_module_keeps_as_a_number_is_refused(tokenizer: Any) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=258,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
        dropout=0.5,
        attention_dropout=0.0,
    )
    model: Any = OPTForCausalLM(config)
    model.train()
    with pytest.raises(ConfigError, match=r"dropout \(0.5\)"):
        LocalChatClient(model, tokenizer, max_context_tokens=64)
    model.eval()
    async with LocalChatClient(model, tokenizer, max_context_tokens=64) as client:
        await client.complete_tokens(request([1], max_tokens=1))
        model.train()
        with pytest.raises(ConfigError, match=r"dropout \(0.5\)"):
            await client.complete_tokens(request([1], max_tokens=1))
        model.eval()
        await client.complete_tokens(request([1], max_tokens=1))
