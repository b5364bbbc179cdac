"""What the GPU's kernels make of adapters, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ludic.inference.local import build
from ludic.inference.local.attention import register
from ludic.inference.local.family_check import through_slots
from ludic.inference.local.gpu.fused_layer import FusedLayer, fused_layers
from ludic.inference.local.view import Forward, module_view
from ludic.plumbing.llama_layers import Adapter
from tests.inference.local.gpu.test_kernels import close
from tests.inference.local.test_families import family

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or `make setup`")


def random_adapter(g: torch.Generator, width: int, inner: int, rank: int) -> Adapter:
    down, up = torch.randn(rank, inner, generator=g), torch.randn(width, rank, generator=g)
    return Adapter(down / 8, up / 4, 0.7)


def merged(weight: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    return weight + adapter.scale * adapter.up @ adapter.down


@pytest.mark.parametrize(("rows", "rank"), [(1, 4), (1, 16), (20, 20), (70, 4)])
def test_products_with_adapters_are_those_of_the_merged_weights(
    kernels: Any, random_numbers: torch.Generator, rows: int, rank: int
) -> None:
    g = random_numbers
    x = torch.randn(rows, 128, generator=g)
    weights = tuple(torch.randn(n, 128, generator=g) / 8 for n in (64, 32, 32))
    adapters = tuple(random_adapter(g, len(w), 128, rank) for w in weights)
    whole = [merged(w, a) for w, a in zip(weights, adapters, strict=True)]
    wanted = torch.cat([x @ w.T for w in whole], 1)
    assert close(kernels.project(x, weights, (None, None, None), adapters), wanted, 1e-4)
    gate, up = weights[1:]
    wanted = F.silu(x @ whole[1].T) * (x @ whole[2].T)
    assert close(kernels.gated(x, gate, up, adapters[1:]), wanted, 1e-4)
    parts = kernels.split_product(x, weights[0], adapters[:1])
    assert close(parts.sum(0), x @ whole[0].T, 1e-4)
    total = torch.randn(rows, 64, generator=g)
    wanted = total + x @ (whole[0] - weights[0]).T
    assert close(kernels.add_low_rank(total, x, adapters[0]), wanted, 1e-4)


@pytest.mark.parametrize("rank", [0, 4])
def test_products_of_large_tiles_are_those_of_small_ones(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, random_numbers: torch.Generator, rank: int
) -> None:
    """The way of a GPU with early launches, but for the waiting."""
    from ludic.inference.local.gpu.kernels import adapters as low
    from ludic.inference.local.gpu.kernels import products

    for module in (low, products):
        monkeypatch.setattr(module, "launch_options", lambda device: {"EARLY": True})
        for name in ("wait_for_others", "let_next_begin", "call_up"):
            monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(low, "BESIDE", True)
    g, rows, inner = random_numbers, 20, 192
    tiles = products.Tiles
    cuts = {
        ("project", rows, inner, 128): tiles(16, 32, 64),
        ("gated", rows, inner, 96): tiles(
            32, 64, 64, more=0 if rank else 16
        ),  # two uneven programs
        ("split", rows, inner, 96): tiles(32, 32, 64, parts=2),  # parts of two steps and of one
    }
    for key, cut in cuts.items():
        monkeypatch.setitem(products.MEASURED, key, cut)
    x = torch.randn(rows, inner, generator=g)
    weights = tuple(torch.randn(n, inner, generator=g) / 8 for n in (64, 32, 32, 96, 96, 96))
    added = tuple(random_adapter(g, len(w), inner, rank) for w in weights) if rank else ()
    whole = [merged(w, a) for w, a in zip(weights, added, strict=True)] if rank else weights
    biases = tuple(torch.randn(n, generator=g) for n in (64, 32, 32))
    wanted = torch.cat([F.linear(x, w, b) for w, b in zip(whole[:3], biases, strict=True)], 1)
    assert close(kernels.project(x, weights[:3], biases, added[:3]), wanted, 1e-4)
    wanted = F.silu(x @ whole[3].T) * (x @ whole[4].T)
    assert close(kernels.gated(x, weights[3], weights[4], added[3:5]), wanted, 1e-4)
    parts = kernels.split_product(x, weights[5], added[5:])
    assert len(parts) == 2
    assert close(parts.sum(0), x @ whole[5].T, 1e-4)


def draw_adapters(model: torch.nn.Module, g: torch.Generator, name: str, std: float) -> None:
    """New values for every parameter whose name has this part."""
    with torch.no_grad():
        for full_name, parameter in model.named_parameters():
            if name in full_name:
                parameter.copy_(std * torch.randn(parameter.shape, generator=g))


def adapted_family(g: torch.Generator, half: bool, **options: Any) -> Any:
    """A Llama with an adapter whose matrices are not zero."""
    from peft import LoraConfig, get_peft_model

    wide = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 128}
    model = family("Llama", **wide, num_hidden_layers=1)
    adapted: Any = get_peft_model(
        model.half() if half else model, LoraConfig(**options), autocast_adapter_dtype=False
    )
    draw_adapters(adapted, g, "lora_A", 0.1)
    draw_adapters(adapted, g, "lora_B", 0.3)
    return adapted.get_base_model()


def exact_and_fused(
    causal: Any, kernels: ModuleType, tokens: tuple[int, ...] = (5, 6)
) -> list[torch.Tensor]:
    """Logits of the same weights in float32 without kernels, and of the fused view."""
    register()
    ids, logits, exact = torch.tensor([tokens]), [], copy.deepcopy(causal).float()
    views = module_view(exact), module_view(causal, stand_in=fused_layers(kernels))
    for model, view in zip((exact, causal), views, strict=True):
        shape = build.kv_shape(model, model.config)
        with torch.inference_mode():
            logits.append(through_slots(Forward(view, torch.device("cpu")), ids, shape))
    assert any(type(m) is FusedLayer for m in view.modules())
    return logits


# What half precision may cost: in 60 draws, with one layer and with two, the fused logits were at
# most 1.3e-3 from those of float32, where plain torch in half precision was up to 2.7e-3 away.
HALF = 4e-3


@pytest.mark.parametrize(
    ("name", "changes"),
    [("Qwen3", {}), ("Mistral", {"sliding_window": 3})],
    ids=["norms of heads", "window"],
)
def test_a_family_gives_the_logits_of_plain_torch(
    kernels: ModuleType, name: str, changes: dict[str, Any]
) -> None:
    tokens = (5, 6, 7, 8, 9, 10)  # two as a chunk, four decoded
    exact, fused = exact_and_fused(family(name, head_dim=16, **changes), kernels, tokens)
    assert close(fused, exact)


EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("early", [True, False])
def test_adapters_of_every_projection_take_part_in_the_fused_products(
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    random_numbers: torch.Generator,
    early: bool,
) -> None:
    monkeypatch.setattr(kernels, "can_be_early", lambda device: early)
    given = list[int]()

    def noted(name: str) -> None:
        whole = getattr(kernels, name)

        def call(*args: Any) -> torch.Tensor:
            given.append(len(args[-1]))
            result: torch.Tensor = whole(*args)
            return result

        monkeypatch.setattr(kernels, name, call)

    for name in ("project", "gated", "split_product"):
        noted(name)
    causal = adapted_family(random_numbers, True, r=4, lora_alpha=6, target_modules=EVERY)
    exact, fused = exact_and_fused(causal, kernels)
    assert set(given) == ({1, 2, 3} if early else {2, 3})
    assert close(fused, exact, HALF)
    draw_adapters(causal, random_numbers, "lora_", 0.2)
    exact, fused_again = exact_and_fused(causal, kernels)
    assert not close(fused_again, fused, 5e-2)
    assert close(fused_again, exact, HALF)


@pytest.mark.parametrize(
    ("half", "options"),
    [
        (True, {"r": 4, "target_modules": ["q_proj", "down_proj", "gate_proj"]}),
        (True, {"r": 4, "target_modules": EVERY, "rank_pattern": {"k_proj": 8, "up_proj": 2}}),
        (False, {"r": 4, "target_modules": EVERY, "use_dora": True}),
        (False, {"r": 80, "target_modules": EVERY}),
    ],
    ids=["some", "ranks", "dora", "high"],
)
def test_an_adapter_that_the_kernels_do_not_know_is_called_as_it_is(
    kernels: ModuleType, random_numbers: torch.Generator, options: dict[str, Any], half: bool
) -> None:
    causal = adapted_family(random_numbers, half, **options)
    exact, fused = exact_and_fused(causal, kernels)
    assert close(fused, exact, HALF if half else 1e-5)
