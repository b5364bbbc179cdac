"""A layer's fused pass beside the family's own code: the same values and the same gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ludic.plumbing.llama_layers import FAMILIES
from ludic.training import TrainerConfig
from ludic.training.update import fused_layers
from ludic.training.update.packing import lay_out, pack
from ludic.training.update.policy import Policy
from tests.training.synthetic import VOCAB, synthetic_batch
from tests.training.update import plain_kernels
from tools.families import SMALL
from tools.families import tiny as tiny_family


def tiny(family: str) -> nn.Module:
    return tiny_family(family, {**SMALL, "vocab_size": VOCAB})


def with_adapter(model: nn.Module, **changes: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}
    adapted = get_peft_model(
        model,
        LoraConfig(**settings | changes),
        autocast_adapter_dtype=False,
    )
    generator = torch.Generator().manual_seed(8)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at first, so that nothing would reach the other half
            parameter.data.normal_(std=0.1, generator=generator)
    result: nn.Module = adapted
    return result


class ExactNorm(nn.Module):
    """A family's norm, which does not round to float32 on the way as theirs do."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


def in_float64(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.__class__ = ExactNorm
    return model


def values_and_gradients(
    model: nn.Module, **settings: Any
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    logprobs, entropies, _ = _scores(Policy(in_float64(model), TrainerConfig(**settings)))
    assert logprobs is not None
    assert entropies is not None
    (logprobs.sum() + (entropies**2).sum()).backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return [logprobs.detach(), entropies.detach()], gradients


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets the CPU take the fused way, and notes the layers that took it."""
    taken: list[int] = []
    call = fused_layers._Parts.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        taken.append(self.layer.self_attn.layer_idx)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(fused_layers, "_suits", lambda x: True)
    monkeypatch.setattr(fused_layers, "_kernels", lambda: plain_kernels)
    monkeypatch.setattr(fused_layers._Parts, "__call__", counted)
    return taken


def check_the_same(model: nn.Module, **settings: Any) -> None:
    plain = copy.deepcopy(model)
    values, gradients = values_and_gradients(model, **settings)
    wanted, oracle = values_and_gradients(plain, fused_layers=False)
    torch.testing.assert_close(values, wanted, rtol=1e-9, atol=1e-9)
    assert gradients.keys() == oracle.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, oracle[name], rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_values_and_gradients_are_those_of_the_family(
    fused: list[int], family: str, checkpointing: bool
) -> None:
    check_the_same(tiny(family).double(), gradient_checkpointing=checkpointing)
    assert fused


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], ["k_proj", "up_proj"]])
def test_an_adapters_gradients_are_those_of_peft(
    fused: list[int], family: str, targets: Any
) -> None:
    model: Any = with_adapter(tiny(family).double(), target_modules=targets)
    assert not model.base_model.model.model.embed_tokens.weight.requires_grad
    check_the_same(model)
    assert fused


def test_an_adapter_that_is_switched_off_has_no_part_in_the_pass(fused: list[int]) -> None:
    base = tiny("qwen2").double()
    model: Any = with_adapter(copy.deepcopy(base))
    with model.disable_adapter(), torch.no_grad():
        values = _scores(Policy(in_float64(model)))
    assert fused
    with torch.no_grad():
        wanted = _scores(Policy(in_float64(base), TrainerConfig(fused_layers=False)))
    torch.testing.assert_close(values[:2], wanted[:2], rtol=1e-9, atol=1e-9)


def _scores(policy: Policy) -> tuple[Tensor | None, ...]:
    layout = lay_out(synthetic_batch(5), max_seq_len=4096)
    micro = pack(layout, range(len(layout.packed)), share=policy.shares)
    return policy(micro, True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: with_adapter(model, lora_dropout=0.5).train(),
        lambda model: with_adapter(model, use_dora=True),
        lambda model: _watched(model),
        lambda model: _patched(model),
        lambda model: _replaced(model),
    ],
    ids=["dropout", "DoRA", "hooks", "patched", "replaced"],
)
def test_other_layers_run_as_their_own_code_says(fused: list[int], change: Any) -> None:
    model = change(tiny("qwen2").double())
    assert all(v is None or v.isfinite().all() for v in _scores(Policy(model)))
    assert not fused


def _watched(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda *args: None)
    return model


def _patched(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.forward = layer.mlp.forward
    return model


def _replaced(model: Any) -> Any:
    for layer in model.model.layers:
        layer.forward = layer.forward
    return model


def test_a_later_policy_says_how_layers_run(fused: list[int]) -> None:
    model = tiny("qwen2").double()
    Policy(model)
    _scores(Policy(model, TrainerConfig(fused_layers=False)))
    assert not fused


def test_a_copy_of_the_model_computes_with_its_own_weights(fused: list[int]) -> None:
    model: Any = tiny("qwen2").double()
    Policy(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    ids = torch.arange(6)[None] + 5
    assert not other(ids).logits.any()
    assert model(ids).logits.any()


def test_nothing_is_kept_for_frozen_weights(fused: list[int]) -> None:
    """A layer without anything to train keeps what its gradients pass through, and no inputs."""
    model: Any = with_adapter(tiny("qwen2").double(), target_modules=["q_proj"])
    kept: list[tuple[int, ...]] = []
    weights = {p.data_ptr() for p in model.parameters()}

    def pack_one(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_one, lambda t: t):
        _scores(Policy(model))
    layers = len(model.base_model.model.model.layers)
    inner = model.config.intermediate_size
    # gate and up, but not their product, which only `down` would want
    assert sum(shape[-1] == inner for shape in kept) == 2 * layers
