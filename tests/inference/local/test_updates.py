"""The trainer's module is shared, and nothing samples from half of an update."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from ludic.errors import DeadlineError
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import ReturnSpec
from ludic.inference.tiny import tiny_model
from tests.inference.local.asking import MODES, ask_all, plain_logprobs, request, until


def shift(model: Any, by: float = 0.05) -> None:
    """An update in place, as an optimizer makes it."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            g = torch.Generator().manual_seed(i)
            p.add_(by * torch.randn(p.shape, generator=g))


@pytest.mark.parametrize("mode", MODES)
async def test_with_finish_requests_in_flight_end_under_the_old_version(
    tokenizer: Any, mode: Any
) -> None:
    model, old = tiny_model(), tiny_model()
    asks = [request([i, 3, 4], max_tokens=30, seed=i, ignore_eos=True) for i in range(12)]
    async with LocalChatClient(model, tokenizer, max_slots=4, **mode) as client:
        tasks = [asyncio.create_task(client.complete_tokens(a)) for a in asks]
        await until(lambda: client.stats()["running"] == 4)
        async with client.updating():
            assert client.stats()["running"] == 0
            shift(model)
            client.set_version(1)
        answers = await asyncio.gather(*tasks)
    versions = set()
    for answer in answers:
        assert answer.trace is not None
        (span,) = answer.trace.version_spans
        assert (span.start, span.end) == (0, 30)
        versions.add(span.version)
        module = old if span.version == 0 else model
        assert answer.trace.completion_logprobs == pytest.approx(
            plain_logprobs(module, answer), abs=1e-4
        )
    assert versions == {0, 1}


@pytest.mark.parametrize("mode", MODES)
async def test_with_continue_requests_go_on_under_a_span_of_the_new_version(
    tokenizer: Any, mode: Any
) -> None:
    model, old = tiny_model(), tiny_model()
    asks = [request([i, 3, 4], max_tokens=150, seed=i, ignore_eos=True) for i in range(6)]
    async with LocalChatClient(model, tokenizer, on_update="continue", **mode) as client:
        tasks = [asyncio.create_task(client.complete_tokens(a)) for a in asks]
        await until(lambda: client.stats()["generated_tokens"] > 60)
        async with client.updating(version=7):
            standing = client.stats()["generated_tokens"]
            assert client.stats()["running"] == 6
            shift(model)
            await asyncio.sleep(0.05)
            assert client.stats()["generated_tokens"] == standing
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert answer.trace is not None
        first, second = answer.trace.version_spans
        assert (first.start, first.version) == (0, 0)
        assert (second.end, second.version) == (150, 7)
        assert first.end == second.start
        cut, logprobs = first.end, answer.trace.completion_logprobs
        assert logprobs is not None
        # Each token's log-prob is that of the version that sampled it, over all that came before.
        assert logprobs[:cut] == pytest.approx(plain_logprobs(old, answer)[:cut], abs=1e-4)
        assert logprobs[cut:] == pytest.approx(plain_logprobs(model, answer)[cut:], abs=1e-4)


async def test_a_new_version_forgets_the_cached_prefixes(model: Any, tokenizer: Any) -> None:
    ask = request(range(50), max_tokens=5, seed=0, ignore_eos=True)
    async with LocalChatClient(model, tokenizer) as client:
        await client.complete_tokens(ask)
        assert client.stats()["cached_tokens"] > 0
        async with client.updating():
            shift(model)
            client.set_version(1)
        await until(lambda: client.stats()["cached_tokens"] == 0)
        answer = await client.complete_tokens(ask)
        assert answer.info["reused_tokens"] == 0
        assert answer.trace is not None
        assert answer.trace.completion_logprobs == pytest.approx(
            plain_logprobs(model, answer), abs=1e-4
        )


async def test_publishing_the_modules_own_tensors_copies_nothing(
    model: Any, tokenizer: Any
) -> None:
    async with LocalChatClient(model, tokenizer) as client:
        said = await client.sync_weights(dict(model.named_parameters()), version=2)
        assert "shared" in said
        assert await client.get_policy_version() == 2
        async with client.updating():
            await client.sync_weights(dict(model.state_dict()), version=3)
        assert await client.get_policy_version() == 3


async def test_publishing_foreign_tensors_copies_them_in(model: Any, tokenizer: Any) -> None:
    other = tiny_model(seed=5)
    async with LocalChatClient(model, tokenizer) as client:
        said = await client.sync_weights(dict(other.state_dict()), version=1)
        assert "copied" in said
        answer = await client.complete_tokens(request([1, 2], max_tokens=20, seed=0))
    assert answer.trace is not None
    assert answer.trace.completion_logprobs == pytest.approx(
        plain_logprobs(other, answer), abs=1e-5
    )


async def test_an_update_that_waits_too_long_gives_up_and_the_engine_goes_on(
    model: Any, tokenizer: Any
) -> None:
    async with LocalChatClient(model, tokenizer) as client:
        task = asyncio.create_task(
            client.complete_tokens(request([1], max_tokens=300, seed=0, ignore_eos=True))
        )
        await until(lambda: client.stats()["running"] == 1)
        with pytest.raises(DeadlineError, match="before an update"):
            async with client.updating(timeout_s=0.01):
                pytest.fail("it cannot have been ready")
        answer = await task
        assert answer.trace is not None
        assert len(answer.trace.completion_token_ids) == 300


async def test_the_trainers_module_keeps_its_mode_and_its_configuration(
    model: Any, tokenizer: Any
) -> None:
    """Training goes on in another thread while the engine samples; neither notices the other."""
    model.train()
    implementation = model.config._attn_implementation
    asks = [request([i, 1], max_tokens=40, seed=i, ignore_eos=True) for i in range(16)]
    async with LocalChatClient(model, tokenizer) as client:
        alone = await ask_all(client, asks)
        stop, losses, modes = threading.Event(), [], set()

        def train() -> None:
            ids = torch.arange(64)[None]
            while not stop.is_set():
                model.zero_grad()
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                losses.append(loss.item())
                modes.add((model.training, model.config._attn_implementation))

        thread = threading.Thread(target=train)
        thread.start()
        beside = await ask_all(client, asks)
        stop.set()
        await asyncio.to_thread(thread.join, 30)
    assert [a.trace for a in alone] == [b.trace for b in beside]
    assert len(set(losses)) == 1
    assert modes == {(True, implementation)}
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mode", MODES)
async def test_a_lora_adapter_is_sampled_from_unmerged(tokenizer: Any, mode: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(tiny_model(), config)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    asks = [request([i, 3, 4], max_tokens=30, seed=i, ignore_eos=True) for i in range(6)]
    async with LocalChatClient(model, tokenizer, **mode) as client:
        before = await ask_all(client, asks)
        async with client.updating(version=1):
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name in names:
                        p.add_(
                            0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
                        )
        after = await ask_all(client, asks)
    assert [a.trace and a.trace.completion_token_ids for a in before] != [
        a.trace and a.trace.completion_token_ids for a in after
    ]
    for answer in after:
        assert answer.trace is not None
        assert answer.trace.completion_logprobs == pytest.approx(
            plain_logprobs(model, answer), abs=1e-4
        )


async def test_a_prompt_being_scored_starts_again_after_an_update(tokenizer: Any) -> None:
    model = tiny_model()
    ask = request(
        range(60), max_tokens=60, seed=0, ignore_eos=True, returns=ReturnSpec(prompt_logprobs=True)
    )
    async with LocalChatClient(model, tokenizer, on_update="continue") as client:
        task = asyncio.create_task(client.complete_tokens(ask))
        async with client.updating(version=1):
            shift(model)
        answer = await task
    assert len(answer.info["prompt_logprobs"]) == 60


@pytest.mark.parametrize("mode", MODES)
async def test_a_crowd_with_one_prompt_survives_many_updates(tokenizer: Any, mode: Any) -> None:
    """Requests wait for a prefix that is being computed again while more of them arrive."""
    model = tiny_model()
    asks = [request([*range(40), i], max_tokens=15, seed=i, ignore_eos=True) for i in range(20)]
    async with LocalChatClient(
        model, tokenizer, max_slots=8, on_update="continue", **mode
    ) as client:
        tasks = [asyncio.create_task(client.complete_tokens(a)) for a in asks]
        version = 0
        while not all(task.done() for task in tasks):
            version += 1
            async with client.updating(version=version):
                pass
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert answer.trace is not None
        assert answer.trace.completion_logprobs == pytest.approx(
            plain_logprobs(model, answer), abs=1e-5
        )
        spans = answer.trace.version_spans
        assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
        assert [s.version for s in spans] == sorted({s.version for s in spans})
