"""The GPU's kernels against plain torch, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ludic.inference.local import LocalChatClient, build
from ludic.inference.local.attention import register, rotate
from ludic.inference.local.family_check import through_slots
from ludic.inference.local.gpu import prefill
from ludic.inference.local.gpu.fused_layer import FusedLayer, fused_layers
from ludic.inference.local.sampler import draw
from ludic.inference.local.view import Forward, module_view
from ludic.inference.sampling import ReturnSpec
from ludic.seeding import keyed_uniform
from tests.inference.local.asking import ask_all, plain_logprobs, request
from tests.inference.local.test_families import family

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or `make setup`")


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool(((found - wanted).abs() <= tolerance * (1 + wanted.abs())).all())


@pytest.mark.parametrize(("rows", "biased"), [(1, True), (20, False), (70, True)])
def test_three_projections_side_by_side(
    kernels: Any, random_numbers: torch.Generator, rows: int, biased: bool
) -> None:
    g = random_numbers
    x = torch.randn(rows, 64, generator=g)
    weights = tuple(torch.randn(n, 64, generator=g) for n in (64, 32, 32))
    biases = tuple(torch.randn(n, generator=g) if biased else None for n in (64, 32, 32))
    wanted = torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], 1)
    assert close(kernels.project(x, weights, biases), wanted, 1e-4)


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_the_gated_product(kernels: Any, random_numbers: torch.Generator, rows: int) -> None:
    g = random_numbers
    x = torch.randn(rows, 64, generator=g)
    gate, up = (torch.randn(96, 64, generator=g) / 8 for _ in range(2))
    wanted = F.silu(x @ gate.T) * (x @ up.T)
    assert close(kernels.gated(x, gate, up), wanted)
    assert close(kernels.silu_times(x @ gate.T, x @ up.T), wanted)
    weight = torch.randn(64, generator=g)
    assert close(kernels.rms_norm(x, weight, 0.1), F.rms_norm(x, (64,), weight, 0.1))


@pytest.mark.parametrize(("rows", "inner"), [(1, 64), (1, 320), (20, 192), (70, 64)])
def test_a_norm_adds_up_the_parts_of_a_product(
    kernels: Any, random_numbers: torch.Generator, rows: int, inner: int
) -> None:
    g = random_numbers
    x, y = torch.randn(rows, 96, generator=g), torch.randn(rows, inner, generator=g)
    weight, scales = torch.randn(96, inner, generator=g), torch.randn(96, generator=g)
    wanted = x + y @ weight.T
    parts = kernels.split_product(y, weight)
    assert close(parts.sum(0), y @ weight.T, 1e-4)
    assert close(kernels.rms_norm(x, scales, 0.1, parts), F.rms_norm(wanted, (96,), scales, 0.1))
    assert close(x, wanted, 1e-4)


def test_rotary_tables_are_those_of_the_model(kernels: Any) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = family("Llama", head_dim=48).config
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 77, 2047, 31_000])
    wanted = rotary(torch.zeros(1), positions[None])
    found = kernels.rotary_tables(rotary.inv_freq, positions, 1.0, torch.float32)
    for ours, theirs in zip(found, wanted, strict=True):
        assert close(ours, theirs[0])


def test_layers_leave_parts_of_their_sums_to_the_next_norm(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    model = family("Llama", **wide, num_hidden_layers=2).half()
    monkeypatch.setattr(kernels, "can_be_early", lambda device: True)
    register()
    shape = build.kv_shape(model, model.config)
    ids = torch.tensor([[5, 6]])
    logits, used = [], list[torch.Tensor]()
    whole = kernels.split_product

    def noted(y: torch.Tensor, w: torch.Tensor, adapters: Any) -> torch.Tensor:
        used.append(w)
        product: torch.Tensor = whole(y, w, adapters)
        return product

    monkeypatch.setattr(kernels, "split_product", noted)
    for view in (module_view(model), module_view(model, stand_in=fused_layers(kernels))):
        with torch.inference_mode():
            logits.append(through_slots(Forward(view, torch.device("cpu")), ids, shape))
    layers = model.model.layers
    assert {id(w) for w in used} == {
        id(m.weight) for x in layers for m in (x.self_attn.o_proj, x.mlp.down_proj)
    }
    assert close(logits[1], logits[0], 5e-3)


def test_keys_and_values_land_in_their_slots_and_nowhere_else(
    kernels: Any, random_numbers: torch.Generator
) -> None:
    g, rows, heads, kv_heads, dim = random_numbers, 5, 6, 3, 16
    flat = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=g)
    q, k, v = flat.view(rows, -1, dim).tensor_split([heads, heads + kv_heads], 1)
    rotary = (torch.randn(rows, dim, generator=g), torch.randn(rows, dim, generator=g))
    keys, values = (torch.randn(9, kv_heads, 40, dim, generator=g) for _ in range(2))
    slots, positions = torch.tensor([3, 1, 4, 0, 8]), torch.tensor([0, 39, 5, 7, 2])
    want_keys, want_values = keys.clone(), values.clone()
    want_keys[slots, :, positions] = rotate(k, rotary)
    want_values[slots, :, positions] = v
    out = kernels.rotate_and_store(q, k, v, rotary, (keys, values), slots, positions)
    assert close(out, rotate(q, rotary))
    assert close(keys, want_keys)
    assert torch.equal(values, want_values)


@pytest.mark.parametrize(
    ("window", "heads", "turns"),
    [(None, 2, True), (None, 6, False), (1, 6, True), (24, 2, False), (24, 6, True)],
)
def test_a_row_attends_to_its_slot_up_to_its_position_and_leaves_its_key_there(
    kernels: Any, random_numbers: torch.Generator, window: int | None, heads: int, turns: bool
) -> None:
    g, kv_heads, dim = random_numbers, 2, 16
    positions = torch.tensor([0, 63, 64, 7, 130])
    flat = torch.randn(5, heads + 2 * kv_heads, dim, generator=g)
    q, k, v = flat.tensor_split([heads, heads + kv_heads], 1)
    rotary = (torch.randn(5, dim, generator=g), torch.randn(5, dim, generator=g))
    keys, values = (torch.randn(6, kv_heads, 144, dim, generator=g) for _ in range(2))
    keys[:, :, 131:] = torch.nan  # nobody may look there
    want_keys, want_values = keys.clone(), values.clone()
    want_keys[range(5), :, positions] = rotate(k, rotary) if turns else k
    want_values[range(5), :, positions] = v
    turned = rotate(q, rotary) if turns else q
    given = rotary if turns else None
    found = kernels.attend_rows(q, k, v, given, (keys, values), positions, 0.3, window)
    assert close(keys.nan_to_num(), want_keys.nan_to_num())
    assert torch.equal(values, want_values)
    for row, position in enumerate(positions.tolist()):
        first = max(0, position + 1 - window) if window else 0
        ks, vs = (
            part[row, :, first : position + 1].repeat_interleave(heads // kv_heads, 0)
            for part in (want_keys, want_values)
        )
        weights = torch.softmax(torch.einsum("hd,htd->ht", turned[row], ks) * 0.3, -1)
        assert close(found[row], torch.einsum("ht,htd->hd", weights, vs))


@pytest.mark.parametrize(("window", "parts"), [(None, 1), (150, 1), (None, 4)])
def test_rows_with_the_same_beginning_read_it_in_one_slot(
    kernels: Any,
    random_numbers: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    parts: int,
) -> None:
    from ludic.inference.local.gpu.kernels import attention

    monkeypatch.setattr(attention, "_BLOCK_BYTES", 4096)  # blocks of 32 tokens
    monkeypatch.setattr(attention, "_SHARED_BLOCK", 32)
    g, dim, shared = random_numbers, 16, 70
    positions = torch.tensor([200, 199, 71, 255])
    q, k, v = (torch.randn(4, heads, dim, generator=g) for heads in (6, 2, 2))
    keys, values = (torch.randn(4, 2, 256, dim, generator=g) for _ in range(2))
    for part in (keys, values):
        part[:, :, :shared] = part[1, :, :shared].clone()
    sources, lengths = torch.tensor([1, 1, 1, 3]), torch.tensor([shared, shared, shared, 0])

    def attend(keys: torch.Tensor, values: torch.Tensor, *where: Any) -> torch.Tensor:
        cache = (keys.clone(), values.clone())
        out: torch.Tensor = kernels.attend_rows(
            q, k, v, None, cache, positions, 0.3, window, parts, *where
        )
        return out

    wanted = attend(keys, values)
    assert torch.equal(attend(keys, values, (sources, lengths)), wanted)
    # Whole blocks of it are read there alone.
    for part in (keys, values):
        part[[0, 2], :, : shared // 32 * 32] = torch.nan
    assert torch.equal(attend(keys, values, (sources, lengths)), wanted)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_draws_are_those_of_the_plain_sampler_and_are_carried_on(
    kernels: Any, random_numbers: torch.Generator
) -> None:
    g, rows, vocab = random_numbers, 12, 5000
    batch = SimpleNamespace(
        inverse_temperature=torch.rand(rows, generator=g) + 0.5,
        keys=torch.randint(-(2**62), 2**62, (rows,), generator=g),
        at=torch.randint(0, 100, (rows,), generator=g),
        live=torch.ones(rows, dtype=torch.long),
        ids=torch.zeros(rows, dtype=torch.long),
        positions=torch.arange(rows),
        tokens=torch.zeros(rows, dtype=torch.long),
        logprobs=torch.zeros(rows),
    )
    batch.live[3] = 0
    logits = 3 * torch.randn(rows, vocab, generator=g)
    logits[5, 17] = torch.nan
    logits[6, 2048:] = -torch.inf
    logits[7, 100] = torch.inf
    logits[8, :] = -1e4
    logits[8, 4096 + 3] = 1e4
    at, positions = batch.at.clone(), batch.positions.clone()
    scaled = logits * batch.inverse_temperature[:, None]
    tokens, logprobs = draw(scaled, keyed_uniform(batch.keys, batch.at))
    kernels.draw_and_carry_on(logits, batch, rows)
    broken = logprobs.isnan()
    assert broken.nonzero()[:, 0].tolist() == [5, 7]
    assert torch.equal(batch.logprobs.isnan(), broken)
    assert torch.equal(batch.tokens[~broken], tokens[~broken])
    assert close(batch.logprobs[~broken], logprobs[~broken])
    assert torch.equal(batch.ids, batch.tokens * batch.live)
    assert torch.equal(batch.at, at + batch.live)
    assert torch.equal(batch.positions, positions + batch.live)


@pytest.mark.parametrize("name", ["Qwen2", "GPT2"])
async def test_an_engine_with_kernels_gives_the_logprobs_of_a_plain_pass(
    kernels: ModuleType, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    head_dim = {} if name == "GPT2" else {"head_dim": 16}
    model = family(name, **head_dim)
    fused = [
        m
        for m in module_view(model, stand_in=fused_layers(kernels)).modules()
        if type(m) is FusedLayer
    ]
    assert len(fused) == (0 if name == "GPT2" else 2)
    dims = 16 if head_dim else 8
    rng = random.Random(0)
    asks = [
        request([rng.randrange(258) for _ in range(length)], seed=i, max_tokens=2)
        for i, length in enumerate((5, 1))
    ]
    # One that extends another's prompt, so that a chunk starts in the middle of a slot.
    asks.append(request([*asks[0].prompt_token_ids, 7, 8], seed=9, max_tokens=2))
    monkeypatch.setattr(build, "usable_kernels", lambda shape: kernels if dims == 16 else None)
    # Padding by one instead of to 4 x 32: the interpreter takes as long for a row that is padding.
    monkeypatch.setattr(prefill, "_width", lambda tokens: tokens + 1)
    monkeypatch.setattr(prefill, "_count", lambda sequences, width: sequences + 1)
    options: Any = {"deterministic": False, "pipelined": True, "max_slots": 4}
    async with LocalChatClient(model, tokenizer, **options) as client:
        answers = [*(await ask_all(client, asks[:-1])), *(await ask_all(client, asks[-1:]))]
        scored = ReturnSpec(prompt_logprobs=True)
        prompt = tuple(range(5, 9))
        judged = await client.complete_tokens(request(prompt, seed=1, max_tokens=1, returns=scored))
    for answer in answers:
        assert answer.trace is not None
        assert answer.trace.completion_logprobs == pytest.approx(
            plain_logprobs(model, answer), abs=2e-5
        )
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = [float(plain[i, t]) for i, t in enumerate(prompt[1:])]
    assert judged.info["prompt_logprobs"][1:] == pytest.approx(wanted, abs=2e-5)


def test_without_a_compiler_the_engine_does_without_kernels(
    kernels: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: torch.Tensor) -> None:
        raise RuntimeError("Failed to find C compiler")

    cpu = torch.device("cpu")
    assert build.can_launch(kernels, cpu)
    assert not build.can_launch(SimpleNamespace(silu_times=fails), cpu)
    assert "Failed to find C compiler" in caplog.text
