"""When new weights may be written straight into a served model, and when it must be rebuilt.

Modules with the names of vLLM's stand in for them, and fake tensors for those on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ludic.distributed.in_vllm.served_model import why_rebuild

LAYERS = "vllm.model_executor.layers"
LINEAR = f"{LAYERS}.linear.UnquantizedLinearMethod"
EMBEDDING = f"{LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod"
ATTENTION = f"{LAYERS}.attention.attention.Attention"
CUDA = torch.device("cuda", 0)
PLAIN = SimpleNamespace(quantization=None, use_mla=False, hf_text_config=SimpleNamespace())
TIED = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=True))


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    with FakeTensorMode():
        yield


def parameter(device: torch.device = CUDA, loads: bool = True) -> nn.Parameter:
    found = nn.Parameter(torch.empty(2, 2, device=device), requires_grad=False)
    if loads:
        found.weight_loader = print  # type: ignore[attr-defined]
    return found


def made(path: str, base: type = nn.Module, **members: Any) -> Any:
    """An object of a class with that full name."""
    module, _, name = path.rpartition(".")
    found = type(name, (base,), {"__module__": module})()
    for member, value in members.items():
        setattr(found, member, value)
    return found


def linear(method: str = LINEAR, **members: Any) -> Any:
    path = f"{LAYERS}.linear.ColumnParallelLinear"
    found = {"weight": parameter(), "bias": parameter(), "quant_method": made(method, object)}
    return made(path, **(found | members))


def served() -> Any:
    """What vLLM makes of a plain decoder: one layer, embedding and head."""
    words = f"{LAYERS}.vocab_parallel_embedding.VocabParallelEmbedding"
    model: Any = nn.Module()
    model.embed = made(words, weight=parameter(), quant_method=made(EMBEDDING, object))
    model.layer = nn.Module()
    model.layer.qkv = linear()
    model.layer.attention = made(ATTENTION, impl=SimpleNamespace(sinks=None))
    type(model.layer.attention).process_weights_after_loading = lambda *_: None
    model.layer.norm = made(f"{LAYERS}.layernorm.RMSNorm", weight=parameter(loads=False))
    model.head = made(words, weight=parameter(), quant_method=made(EMBEDDING, object))
    return model


def test_a_plain_model_on_a_gpu_is_written_in_place() -> None:
    assert why_rebuild(served(), PLAIN, CUDA) is None


def test_a_tied_head_is_no_reason_where_the_model_is_meant_so() -> None:
    model: Any = served()
    model.head.weight = model.embed.weight
    assert why_rebuild(model, TIED, CUDA) is None
    assert why_rebuild(model, PLAIN, CUDA) == "head shares a parameter with embed"


def packed(model: Any) -> None:
    model.layer.qkv.quant_method = made(f"{LAYERS}.quantization.fp8.Fp8LinearMethod", object)


def experts(model: Any) -> None:
    moe = f"{LAYERS}.fused_moe.layer"
    model.layer.experts = made(
        f"{moe}.FusedMoE",
        w13_weight=parameter(),
        quant_method=made(f"{moe}.UnquantizedFusedMoEMethod", object),
    )


def subclassed_method(model: Any) -> None:
    model.layer.qkv.quant_method = made("elsewhere.UnquantizedLinearMethod", object)


def latent_attention(model: Any) -> None:
    model.layer.attention = made(f"{LAYERS}.attention.mla_attention.MLAAttention")
    type(model.layer.attention).process_weights_after_loading = lambda *_: None


def sinks(model: Any) -> None:
    model.layer.attention.impl.sinks = parameter()


def scales(model: Any) -> None:
    model.layer.attention.quant_method = made(f"{LAYERS}.kv_cache.BaseKVCacheMethod", object)


def adapters(model: Any) -> None:
    path = "vllm.lora.layers.column_parallel_linear.QKVParallelLinearWithLoRA"
    model.layer.qkv = made(path, base_layer=linear())


def replaced(model: Any) -> None:
    model.layer.qkv.weight = parameter(loads=False)


def offloaded(model: Any) -> None:
    model.layer.qkv.weight = parameter(torch.device("cpu"))


def own_parameter(model: Any) -> None:
    model.layer.mixer = made(f"{LAYERS}.mamba.MambaMixer", A=parameter())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (packed, "layer.qkv: its weights are stored by Fp8LinearMethod"),
        (experts, "layer.experts: its weights are stored by UnquantizedFusedMoEMethod"),
        (subclassed_method, "layer.qkv: its weights are stored by UnquantizedLinearMethod"),
        (latent_attention, "layer.attention: MLAAttention computes something from its weights"),
        (sinks, "layer.attention: its attention has its own parameters"),
        (scales, "layer.attention: its attention has its own parameters"),
        (adapters, "layer.qkv: QKVParallelLinearWithLoRA wraps a layer for adapters"),
        (replaced, "layer.qkv: its parameters were replaced after they were loaded"),
        (offloaded, "layer.qkv: its parameters lie on another device"),
        (own_parameter, "layer.mixer: MambaMixer is not known to use its parameters as they are"),
    ],
)
def test_whatever_is_not_known_to_be_plain_is_rebuilt(
    change: Callable[[Any], None], says: str
) -> None:
    model = served()
    change(model)
    assert why_rebuild(model, PLAIN, CUDA) == says


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (SimpleNamespace(quantization="fp8"), "quantised (fp8)"),
        (SimpleNamespace(quantization=None, use_mla=True), "latent attention"),
    ],
)
def test_what_the_server_says_of_its_model_counts(config: Any, says: str) -> None:
    assert says in str(why_rebuild(served(), config, CUDA))


def test_on_the_cpu_layers_are_always_rebuilt() -> None:
    assert why_rebuild(served(), PLAIN, torch.device("cpu")) == "the device is cpu"
