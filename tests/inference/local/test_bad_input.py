"""What cannot be served is named, and the others are served on."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch

from ludic.errors import ConfigError, InferenceError, PublishError, RequestRejectedError
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import SamplingConfig
from ludic.inference.tiny import tiny_model
from tests.inference.local.asking import MODES, plain_logprobs, request


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ((), "empty"),
        (range(64), "64 tokens"),
        ((1, 258), r"prompt_token_ids\[1\] = 258"),
        ((-1,), r"prompt_token_ids\[0\] = -1"),
        ((1.5,), r"1\.5"),
        ((True,), "True"),
    ],
)
async def test_a_prompt_that_cannot_be_served_is_named_and_the_others_are_served(
    model: Any, tokenizer: Any, prompt: Any, says: str
) -> None:
    async with LocalChatClient(model, tokenizer, max_context_tokens=64) as client:
        good = asyncio.create_task(
            client.complete_tokens(request([1, 2], max_tokens=20, seed=0, ignore_eos=True))
        )
        with pytest.raises(RequestRejectedError, match=says):
            await client.complete_tokens(request(prompt, max_tokens=4))
        answer = await good
        assert answer.trace is not None
        assert len(answer.trace.completion_token_ids) == 20


def test_no_tokens_at_all_cannot_even_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="max_tokens=0"):
        SamplingConfig(max_tokens=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"stop_token_ids": (999,)}, "stop_token_ids"), ({"timeout_s": -1.0}, "timeout_s")],
)
async def test_a_wrong_limit_is_named(
    model: Any, tokenizer: Any, changes: dict[str, Any], says: str
) -> None:
    async with LocalChatClient(model, tokenizer) as client:
        with pytest.raises(RequestRejectedError, match=says):
            await client.complete_tokens(request([1], max_tokens=1, **changes))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
async def test_logits_that_are_not_finite_fail_their_own_request_only(
    tokenizer: Any, mode: Any, temperature: float
) -> None:
    model = tiny_model()
    model.config.tie_word_embeddings = False
    head = torch.nn.Linear(64, 258, bias=False)
    head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.lm_head = head
    with torch.no_grad():
        model.model.embed_tokens.weight[200] = float("nan")
    clean = tiny_model()

    def ask(prompt: list[int], seed: int) -> Any:
        return request(
            prompt, max_tokens=30, seed=seed, temperature=temperature, stop_token_ids=(200,)
        )

    async with LocalChatClient(model, tokenizer, max_slots=4, **mode) as client:
        results = await asyncio.gather(
            *(
                client.complete_tokens(ask([5, i, 200 if i % 3 == 0 else 7, 9], i))
                for i in range(24)
            ),
            return_exceptions=True,
        )
        for i, result in enumerate(results):
            if i % 3 == 0:
                assert isinstance(result, InferenceError), i
                assert "not finite" in str(result)
                assert f"seed {i}" in str(result)
            elif temperature:
                assert not isinstance(result, BaseException), result
                assert result.trace is not None
                assert result.trace.completion_logprobs == pytest.approx(
                    plain_logprobs(clean, result), abs=1e-5
                )
        assert client.stats()["slots_taken"] == 0
        assert client.stats()["failed"] == 8


async def test_a_step_that_raises_fails_its_requests_and_the_next_ones_are_served(
    model: Any, tokenizer: Any
) -> None:
    async with LocalChatClient(model, tokenizer) as client:
        scheduler: Any = client._scheduler

        def broken(work: Any) -> Any:
            del scheduler.compute, scheduler.decode_step
            raise RuntimeError("the roof is on fire")

        scheduler.compute = scheduler.decode_step = broken
        with pytest.raises(InferenceError, match="roof"):
            await client.complete_tokens(request([1], max_tokens=1, seed=0))
        assert (await client.complete_tokens(request([1], max_tokens=1, seed=0))).trace is not None


async def test_a_version_that_goes_back_is_refused(model: Any, tokenizer: Any) -> None:
    async with LocalChatClient(model, tokenizer, version=5) as client:
        with pytest.raises(PublishError, match="version 4 after 5"):
            client.set_version(4)
        with pytest.raises(PublishError, match="version 3 after 5"):
            await client.sync_weights({}, version=3)
        assert await client.get_policy_version() == 5
        answer = await client.complete_tokens(request([1], max_tokens=1, seed=0))
        assert answer.trace is not None
        assert answer.trace.version_spans[0].version == 5


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"nobody": torch.zeros(1)}, "nobody"),
        ({"model.norm.weight": torch.zeros(3)}, r"shape \(3,\)"),
    ],
)
async def test_weights_that_do_not_fit_are_named_and_change_nothing(
    model: Any, tokenizer: Any, params: Any, says: str
) -> None:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    async with LocalChatClient(model, tokenizer) as client:
        with pytest.raises(PublishError, match=says):
            await client.sync_weights({"lm_head.weight": torch.zeros(258, 64), **params}, version=1)
        assert await client.get_policy_version() == 0
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_module_under_fsdp2_is_refused(model: Any, tokenizer: Any, tmp_path: Any) -> None:
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(model)
        with pytest.raises(ConfigError, match=r"sharded.*FSDP2"):
            LocalChatClient(model, tokenizer)
    finally:
        dist.destroy_process_group()


async def test_active_dropout_is_refused_when_made_and_when_it_comes_later(tokenizer: Any) -> None:
    from transformers import Qwen2ForCausalLM

    config = tiny_model().config
    config.attention_dropout = 0.1
    model = Qwen2ForCausalLM(config)
    model.train()
    with pytest.raises(ConfigError, match="dropout"):
        LocalChatClient(model, tokenizer)
    model.eval()
    async with LocalChatClient(model, tokenizer) as client:
        await client.complete_tokens(request([1], max_tokens=1))
        model.train()
        with pytest.raises(ConfigError, match=r"attention_dropout \(0.1\)"):
            await client.complete_tokens(request([1], max_tokens=1))
        model.eval()
        await client.complete_tokens(request([1], max_tokens=1))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_context_tokens": 5000}, "1024 positions"),
        ({"max_context_tokens": 1}, "max_context_tokens=1"),
        ({"max_slots": 0}, "max_slots"),
        ({"max_queue": 0}, "max_queue"),
        ({"step_rows": 1}, "step_rows"),
        ({"deterministic": True, "pipelined": True}, "deterministic and pipelined"),
        ({"on_update": "maybe"}, "on_update"),
        ({"on_full": "maybe"}, "on_full"),
    ],
)
def test_settings_that_cannot_work_are_named(
    model: Any, tokenizer: Any, options: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        LocalChatClient(model, tokenizer, **options)


def test_a_module_that_is_no_language_model_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="Linear is no Hugging Face"):
        LocalChatClient(torch.nn.Linear(2, 2), tokenizer)


def test_a_family_without_key_value_attention_is_refused(tokenizer: Any) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ConfigError):
        LocalChatClient(model.eval(), tokenizer, max_context_tokens=64)
