"""The compiled kernels in bfloat16 against float64, and whole engines against plain passes."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.inference import LocalChatClient, SamplingConfig
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local.attention import rotate
from ludic.inference.local.gpu.fused_layer import FusedLayer
from ludic.inference.local.sampler import draw
from ludic.inference.tiny import tiny_tokenizer
from ludic.plumbing.llama_layers import Adapter
from ludic.seeding import keyed_uniform
from tests.inference.local.test_families import family

pytestmark = pytest.mark.gpu


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def off(found: Tensor, wanted: Tensor) -> float:
    """The relative error of the whole."""
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [1, 16, 50, 128, 256])
def test_products_in_bfloat16(rows: int) -> None:
    from ludic.inference.local.gpu import kernels

    x = numbers(rows, 896)
    weights = numbers(896, 896, seed=1), numbers(128, 896, seed=2), numbers(128, 896, seed=3)
    biases = numbers(896, seed=4), numbers(128, seed=5), numbers(128, seed=6)
    wanted = torch.cat(
        [
            F.linear(x.double(), w.double(), b.double())
            for w, b in zip(weights, biases, strict=True)
        ],
        dim=1,
    )
    assert off(kernels.project(x, weights, biases), wanted) < 5e-3
    gate, up = numbers(4864, 896, seed=7) / 30, numbers(4864, 896, seed=8) / 30
    wanted = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert off(kernels.gated(x, gate, up), wanted) < 5e-3
    weight = numbers(896, seed=9)
    wanted = F.rms_norm(x.double(), (896,), weight.double(), 1e-6)
    assert off(kernels.rms_norm(x, weight, 1e-6), wanted) < 5e-3


@pytest.mark.parametrize("rows", [1, 16, 50, 128, 256])
@pytest.mark.parametrize(("inner", "width"), [(896, 896), (4864, 896), (576, 576), (1536, 576)])
def test_a_split_product_is_as_exact_as_the_vendors(rows: int, inner: int, width: int) -> None:
    from ludic.inference.local.gpu import kernels

    x, y, weight = numbers(rows, width), numbers(rows, inner, seed=1), numbers(width, inner, seed=2)
    scales = numbers(width, seed=3)
    wanted = x.double() + y.double() @ weight.double().T
    vendors = torch.addmm(x, y, weight.T)
    again = x.clone()
    normed = kernels.rms_norm(x, scales, 1e-6, kernels.split_product(y, weight))
    assert off(x, wanted) <= 1.01 * off(vendors, wanted)
    assert off(normed, F.rms_norm(wanted, (width,), scales.double(), 1e-6)) < 5e-3
    kernels.rms_norm(again, scales, 1e-6, kernels.split_product(y, weight))
    assert torch.equal(again, x)


@pytest.mark.parametrize("rows", [1, 50, 128, 256])
@pytest.mark.parametrize("rank", [4, 16, 24])
@pytest.mark.parametrize("inner", [640, 896, 2304])
def test_products_with_adapters_in_bfloat16(rows: int, rank: int, inner: int) -> None:
    from ludic.inference.local.gpu import kernels

    x = numbers(rows, inner)
    q, k, v = (numbers(n, inner, seed=n) / 30 for n in (896, 128, 64))
    weights = q, k, v
    adapters = tuple(
        Adapter(numbers(rank, inner, seed=i) / 30, numbers(len(w), rank, seed=9 + i) / 4, 1.5)
        for i, w in enumerate(weights)
    )
    whole = [
        w.double() + a.scale * a.up.double() @ a.down.double()
        for w, a in zip(weights, adapters, strict=True)
    ]
    wanted = torch.cat([x.double() @ w.T for w in whole], dim=1)
    assert off(kernels.project(x, weights, (None, None, None), adapters), wanted) < 6e-3
    wide = (weights[0], weights[0].flip(0).contiguous()), (adapters[0], adapters[0])
    second = wide[0][1].double() + (whole[0] - weights[0].double())
    wanted = F.silu(x.double() @ whole[0].T) * (x.double() @ second.T)
    assert off(kernels.gated(x, *wide[0], wide[1]), wanted) < 6e-3
    parts = kernels.split_product(x, weights[0], adapters[:1])
    assert off(parts.sum(0), x.double() @ whole[0].T) < 6e-3
    total = numbers(rows, 896, seed=20)
    wanted = total.double() + x.double() @ (whole[0] - weights[0].double()).T
    assert off(kernels.add_low_rank(total, x, adapters[0]), wanted) < 6e-3


@pytest.mark.parametrize(("rank", "beside"), [(0, False), (16, False), (16, True)])
@pytest.mark.parametrize(
    ("name", "inner", "width", "rows"),
    [("gated", 1536, 8960, 128), ("split", 8960, 1536, 100), ("split", 18944, 3584, 128)],
)
def test_large_products_in_a_graph_follow_their_input(
    name: str,
    inner: int,
    width: int,
    rows: int,
    rank: int,
    beside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside its adapter's first product, a product reads its input before it waits: each replay
    must see what the norm in front of both has just written."""
    from ludic.inference.local.gpu import kernels
    from ludic.inference.local.gpu.kernels import adapters as low
    from ludic.inference.local.gpu.kernels.products import MEASURED, Tiles

    monkeypatch.setattr(low, "BESIDE", beside)
    cut = Tiles(128, 128, 64, 8, 4, more=16) if name == "gated" else Tiles(128, 128, 64, 8, 6, 4)
    monkeypatch.setitem(MEASURED, (name, rows, inner, width), cut)
    count = 2 if name == "gated" else 1
    weights = [numbers(width, inner, seed=i) / 60 for i in range(count)]
    adapters = tuple(
        Adapter(numbers(rank, inner, seed=i) / 60, numbers(width, rank, seed=9 + i) / 8, 1.5)
        for i in range(count if rank else 0)
    )
    given, scales = numbers(rows, inner), torch.ones_like(numbers(inner))

    def layer() -> Tensor:
        x = kernels.rms_norm(given, scales, 1e-6)
        if name == "gated":
            return kernels.gated(x, weights[0], weights[-1], adapters)
        return kernels.split_product(x, weights[0], adapters).sum(0)

    layer()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = [layer() for _ in range(3)][-1]
    whole = [w.double() for w in weights]
    for w, a in zip(whole, adapters, strict=False):
        w += a.scale * a.up.double() @ a.down.double()
    for seed in range(20):
        given.copy_(numbers(rows, inner, seed=100 + seed))
        graph.replay()
        x = F.rms_norm(given.double(), (inner,), None, 1e-6)
        products = [x @ w.T for w in whole]
        wanted = F.silu(products[0]) * products[1] if name == "gated" else products[0]
        assert off(found, wanted) < 6e-3


def test_rotary_tables_are_those_of_torch() -> None:
    from ludic.inference.local.gpu import kernels

    frequencies = 10_000.0 ** -(torch.arange(32, device="cuda") / 32)
    positions = torch.arange(0, 131_072, 37, device="cuda")
    angles = (positions[:, None].float() * frequencies).repeat(1, 2)
    cos, sin = kernels.rotary_tables(frequencies, positions, 0.5, torch.float32)
    torch.testing.assert_close(cos, angles.cos() / 2, atol=1e-6, rtol=0)
    torch.testing.assert_close(sin, angles.sin() / 2, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [3, 128])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_in_bfloat16(dim: int, rows: int, window: int | None) -> None:
    from ludic.inference.local.gpu import kernels

    heads, kv_heads, length = 14, 2, 400
    qkv = numbers(rows, (heads + 2 * kv_heads) * dim).view(rows, -1, dim)
    q, k, v = qkv.tensor_split([heads, heads + kv_heads], 1)
    rotary = numbers(rows, dim, seed=1), numbers(rows, dim, seed=2)
    keys, values = (numbers(rows + 1, kv_heads, length, dim, seed=s) for s in (3, 4))
    slots = torch.arange(rows, device="cuda")
    positions = (slots * 37) % length
    turned = kernels.rotate_and_store(q, k, v, rotary, (keys, values), slots, positions)
    exact = rotary[0].double(), rotary[1].double()
    assert off(turned, rotate(q.double(), exact)) < 5e-3
    assert off(keys[slots, :, positions], rotate(k.double(), exact)) < 5e-3
    assert torch.equal(values[slots, :, positions], v)
    keys[slots, :, positions], values[slots, :, positions] = 0, 0
    found = kernels.attend_rows(q, k, v, rotary, (keys, values), positions, dim**-0.5, window)
    assert off(keys[slots, :, positions], rotate(k.double(), exact)) < 5e-3
    assert torch.equal(values[slots, :, positions], v)
    at = torch.arange(length, device="cuda")
    seen = at <= positions[:, None]
    if window is not None:
        seen &= at > positions[:, None] - window
    wanted = F.scaled_dot_product_attention(
        turned.double()[:, :, None],
        keys[:rows].double(),
        values[:rows].double(),
        attn_mask=seen[:, None, None],
        enable_gqa=True,
    )
    assert off(found, wanted[:, :, 0]) < 5e-3


@pytest.mark.parametrize(("rows", "parts"), [(8, 1), (8, 5), (128, 1)])
def test_a_beginning_that_rows_share_is_read_in_one_slot(rows: int, parts: int) -> None:
    from ludic.inference.local.gpu import kernels

    heads, kv_heads, dim, length, shared = 12, 2, 128, 700, 300
    qkv = numbers(rows, (heads + 2 * kv_heads) * dim).view(rows, -1, dim)
    q, k, v = qkv.tensor_split([heads, heads + kv_heads], 1)
    keys, values = (numbers(rows, kv_heads, length, dim, seed=s) for s in (3, 4))
    cache, slots = (keys, values), torch.arange(rows, device="cuda")
    sources = slots // 4 * 4
    for part in cache:
        part[:, :, :shared] = part[sources, :, :shared]
    positions = shared + (slots * 37) % (length - shared)
    attend = partial(kernels.attend_rows, q, k, v, None, cache, positions, dim**-0.5, None, parts)
    wanted = attend()
    lengths = torch.where(slots == sources, 0, shared)
    for part in cache:  # whole blocks, of whatever size, are looked for there alone
        part[slots != sources, :, : shared // 128 * 128] = torch.nan
    assert torch.equal(attend((sources, lengths)), wanted)


def test_draws_are_those_of_the_plain_sampler() -> None:
    from ludic.inference.local.gpu import kernels

    rows, vocab = 256, 151_936
    generator = torch.Generator("cuda").manual_seed(0)

    def integers(high: int) -> Tensor:
        return torch.randint(0, high, (rows,), generator=generator, device="cuda")

    batch = SimpleNamespace(
        inverse_temperature=torch.full((rows,), 1.4, device="cuda"),
        keys=integers(2**62) - 2**61,
        at=integers(100),
        live=torch.ones(rows, dtype=torch.long, device="cuda"),
        ids=integers(1),
        positions=integers(1),
        tokens=integers(1),
        logprobs=torch.zeros(rows, device="cuda"),
    )
    logits = 3 * numbers(rows, vocab)
    logits[7, 99] = torch.nan
    scaled = logits.float() * batch.inverse_temperature[:, None]
    tokens, logprobs = draw(scaled, keyed_uniform(batch.keys, batch.at))
    kernels.draw_and_carry_on(logits, batch, rows)
    assert logprobs.isnan().nonzero().flatten().tolist() == [7]
    assert batch.logprobs.isnan().nonzero().flatten().tolist() == [7]
    # A sum in another order may tip a draw that lies on the border of two tokens.
    same = (tokens == batch.tokens) & ~logprobs.isnan()
    assert int(same.sum()) >= rows - 3
    torch.testing.assert_close(batch.logprobs[same], logprobs[same], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral"])
async def test_a_family_in_bfloat16_samples_what_a_plain_pass_says(name: str) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = family(name, **wide).bfloat16().cuda()
    asked = [
        TokenCompletionRequest(
            "tiny", tuple(range(3, 5 + 7 * i)), SamplingConfig(seed=i, max_tokens=60)
        )
        for i in range(12)
    ]
    async with LocalChatClient(model, tiny_tokenizer(), max_slots=16) as client:
        view = client._scheduler.batch.forward.view  # type: ignore[attr-defined]
        assert sum(type(m) is FusedLayer for m in view.modules()) == 2
        answers = await asyncio.gather(*(client.complete_tokens(r) for r in asked))
    exact = model.float()
    for answer in answers:
        assert answer.trace is not None
        ids, n = answer.trace.token_ids, len(answer.trace.prompt_token_ids)
        with torch.no_grad():
            logits = exact(input_ids=torch.tensor([ids], device="cuda")).logits[0, n - 1 : -1]
        wanted = logits.log_softmax(-1).cpu()[torch.arange(len(ids) - n), list(ids[n:])]
        got = torch.tensor(answer.trace.completion_logprobs)
        torch.testing.assert_close(got, wanted, atol=0.03, rtol=0)
