"""What the engine cannot serve as promised is refused when the client is made."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.inference.local import LocalChatClient
from ludic.inference.local.attention import Masks, register
from ludic.inference.local.build import kv_shape
from ludic.inference.local.family_check import check_same_logits, text_ids
from ludic.inference.local.view import Forward, module_view
from ludic.inference.tiny import tiny_model
from tests.inference.local.asking import MODES, ask_all, plain_logprobs, request
from tests.inference.local.test_families import family

SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 257,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
DTYPES = [torch.float32, torch.bfloat16]
CHUNKED: dict[str, Any] = {
    "attention_chunk_size": 8,
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
    "moe_layers": [1],
}


def tiny(name: str, *, config: str | None = None, **changes: Any) -> Any:
    import transformers

    made = getattr(transformers, f"{config or name}Config")(**{**SIZES, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(made).eval()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1:
                    p.normal_(std=0.15)
    return model


@pytest.mark.parametrize("step_rows", [None, 64])
@pytest.mark.parametrize("name", list(EXPERTS))
def test_a_mixture_of_experts_is_refused_in_the_deterministic_mode(
    tokenizer: Any, name: str, step_rows: int | None
) -> None:
    with pytest.raises(ConfigError, match=r"mixture of experts.*set deterministic=False"):
        LocalChatClient(tiny(name, **EXPERTS[name]), tokenizer, step_rows=step_rows)


@pytest.mark.parametrize("name", list(EXPERTS))
async def test_a_mixture_of_experts_gives_its_own_logprobs_in_the_fast_mode(
    tokenizer: Any, name: str
) -> None:
    model = tiny(name, **EXPERTS[name])
    rng = random.Random(0)
    asks = [
        request([rng.randrange(258) for _ in range(rng.randrange(1, 40))], seed=i, max_tokens=12)
        for i in range(4)
    ]
    async with LocalChatClient(model, tokenizer, deterministic=False) as client:
        answers = await ask_all(client, asks)
    for answer in answers:
        assert answer.trace is not None
        assert answer.trace.completion_logprobs == pytest.approx(
            plain_logprobs(model, answer), abs=2e-5
        )


@pytest.mark.parametrize("mode", MODES)
def test_attention_in_chunks_is_refused(tokenizer: Any, mode: Any) -> None:
    model = tiny("Llama4", config="Llama4Text", **CHUNKED)
    with pytest.raises(ConfigError, match=r"Llama4ForCausalLM attends in chunks.*vLLM"):
        LocalChatClient(model, tokenizer, **mode)


def test_layers_that_are_named_chunked_are_refused_without_a_size(tokenizer: Any) -> None:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ConfigError, match=r"attends in chunks.*vLLM"):
        LocalChatClient(model, tokenizer)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_attends_twice_is_refused(tokenizer: Any, mode: Any) -> None:
    with pytest.raises(ConfigError, match=r"DiffLlamaForCausalLM: layer 0 .*more than once.*vLLM"):
        LocalChatClient(tiny("DiffLlama"), tokenizer, **mode)


class WithTheTokenBefore(nn.Module):
    """Adds what came for the token before, as convolutions and token shifts do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        out: Tensor = self.inner(x) + before
        return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_family_that_remembers_beside_its_keys_and_values_is_refused(
    tokenizer: Any, mode: Any, dtype: torch.dtype
) -> None:
    model = tiny_model()
    model.model.layers[0].mlp = WithTheTokenBefore(model.model.layers[0].mlp)
    with pytest.raises(ConfigError, match=r"the engine's logits differ.*vLLM"):
        LocalChatClient(model.to(dtype), tokenizer, **mode)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "GPT2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pipelined", [False, True])
async def test_a_family_is_served_in_a_half_type(
    tokenizer: Any, name: str, dtype: torch.dtype, pipelined: bool
) -> None:
    model = family(name).to(dtype)
    options: Any = {"deterministic": False, "pipelined": pipelined}
    async with LocalChatClient(model, tokenizer, **options) as client:
        answer = await client.complete_tokens(request(range(65, 90), max_tokens=4, seed=0))
    assert answer.trace is not None
    exact = plain_logprobs(model.float(), answer)
    assert answer.trace.completion_logprobs == pytest.approx(exact, abs=0.02)


def sees_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    get = Masks.get
    monkeypatch.setattr(Masks, "get", lambda *args: torch.zeros_like(get(*args)))


def forgets_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    get = Masks.get
    monkeypatch.setattr(Masks, "get", lambda self, window, *rest: get(self, None, *rest))


def decodes_one_place_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Forward.__call__

    def shifted(self: Forward, ids: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        return call(self, ids, positions + (1 if ids.shape[1] == 1 else 0), *rest)

    monkeypatch.setattr(Forward, "__call__", shifted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "wrong", [sees_what_comes_later, forgets_the_window, decodes_one_place_too_far]
)
def test_an_engine_that_is_wrong_is_found_out_in_any_type(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, wrong: Any, dtype: torch.dtype
) -> None:
    model = tiny("Mistral", sliding_window=6).to(dtype)
    check_engine(model, tokenizer)
    wrong(monkeypatch)
    with pytest.raises(ConfigError, match=r"the engine's logits differ.*rounding explains"):
        check_engine(model, tokenizer)


def test_an_engine_that_rounds_otherwise_is_taken_where_rounding_matters_much(
    tokenizer: Any,
) -> None:
    model = tiny("Llama", num_hidden_layers=12)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.uniform_(0.3, 1.7, generator=numbers)
            elif "layers" in name:
                p.mul_(3)
    check_engine(model.bfloat16(), tokenizer, fuse_norms=True)


def check_engine(model: Any, tokenizer: Any, *, fuse_norms: bool = False) -> None:
    register()
    shape = kv_shape(model, model.config)
    forward = Forward(module_view(model, fuse_norms=fuse_norms), shape.device)
    check_same_logits(model, forward, shape, 64, tokenizer)


class OnlyDecodes:
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


def test_a_check_reads_ordinary_text_or_ids_from_all_over_the_vocabulary(tokenizer: Any) -> None:
    text = text_ids(tokenizer, 258, 16)
    assert tokenizer.decode(text) == "The weather was "
    for spread in (text_ids(OnlyDecodes(), 258, 16), text_ids(tokenizer, 100, 16)):
        assert len(set(spread)) == 16
        assert min(spread) > 0
    assert max(text_ids(tokenizer, 100, 16)) < 99  # the text's ids are beyond this vocabulary


@pytest.mark.parametrize("max_context_tokens", [2, 3, 16])
async def test_a_short_context_is_checked_with_as_many_tokens_as_it_has(
    tokenizer: Any, max_context_tokens: int
) -> None:
    model = tiny_model(max_position_embeddings=max_context_tokens)
    async with LocalChatClient(model, tokenizer) as client:
        answer = await client.complete_tokens(request([1], max_tokens=1, seed=0))
    assert answer.trace is not None
    assert answer.trace.completion_logprobs == pytest.approx(
        plain_logprobs(model, answer), abs=1e-5
    )
