"""Families as transformers defines them, small or at real widths, with weights scaled like trained
ones: attention that is far from uniform, logits of a few units, norms that are not one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

WINDOW = 20
"""Of the small models: longer than the text of the engine's own check."""
SMALL: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 257,
}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
}
GRANITE: dict[str, Any] = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
SOFT_CAPPED = "asks for soft-capped or sink attention"
SOME_WINDOWS: dict[str, Any] = {
    "head_dim": 16,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}


def theta(base: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


def sizes(
    hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """A published shape with two layers."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "num_hidden_layers": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


class Family(NamedTuple):
    """A class of transformers: what makes its small form what it is, and a published shape.

    `refused` is what the engine says about it, where it does not serve it.
    """

    kind: str
    small: dict[str, Any]
    like: str = ""
    shape: Mapping[str, Any] = MappingProxyType({})
    refused: str = ""


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "Llama",
        {
            "rope_parameters": LLAMA3
            | {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
        },
        "Llama-3.2-1B",
        sizes(2048, 8192, 32, 8, 64, 128256, max_position_embeddings=131072)
        | {
            "rope_parameters": LLAMA3
            | {"rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192}
        },
    ),
    "qwen2": Family(
        "Qwen2",
        {},
        "Qwen2.5-0.5B",
        sizes(896, 4864, 14, 2, 64, 151936, tie_word_embeddings=True) | theta(1e6),
    ),
    "qwen2 with windows": Family("Qwen2", {k: SOME_WINDOWS[k] for k in list(SOME_WINDOWS)[1:]}),
    "qwen3": Family(
        "Qwen3",
        {"head_dim": 16},
        "Qwen3-0.6B",
        sizes(1024, 3072, 16, 8, 128, 151936) | theta(1e6),
    ),
    "qwen3 with windows": Family("Qwen3", SOME_WINDOWS),
    "gemma2": Family(
        "Gemma2",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
        "Gemma-2-2B",
        sizes(2304, 9216, 8, 4, 256, 256000, query_pre_attn_scalar=256, sliding_window=4096),
        refused=SOFT_CAPPED,
    ),
    "gemma2 without a cap on attention": Family(
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 4.0,
        },
        "Gemma-2-2B, attention not capped",
        sizes(2304, 9216, 8, 4, 256, 256000, query_pre_attn_scalar=256, sliding_window=4096)
        | {"attn_logit_softcapping": None, "final_logit_softcapping": 4.0},
    ),
    "gemma3": Family(
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "Gemma-3-1B",
        sizes(1152, 6912, 4, 1, 256, 262144, query_pre_attn_scalar=256, sliding_window=512)
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": Family(
        "Mistral",
        {"sliding_window": WINDOW},
        "Mistral-7B-v0.1",
        sizes(4096, 14336, 32, 8, 128, 32000, sliding_window=4096),
    ),
    "phi3": Family(
        "Phi3",
        {"sliding_window": WINDOW},
        "Phi-3-mini-4k",
        sizes(3072, 8192, 32, 32, 96, 32064, sliding_window=2047),
    ),
    "phi3 with longrope": Family(
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        refused="rope type 'longrope'",
    ),
    "olmo2": Family("Olmo2", {}, "OLMo-2-1B", sizes(2048, 8192, 16, 16, 128, 100352) | theta(5e5)),
    "granite": Family(
        "Granite",
        GRANITE | {"logits_scaling": 0.5, "attention_multiplier": 0.12},
        "Granite-3-2B",
        sizes(2048, 8192, 32, 8, 64, 49155)
        | GRANITE
        | {"logits_scaling": 8.0, "attention_multiplier": 0.015625},
    ),
}


def built(family: Family, options: Mapping[str, Any], device: str = "cpu") -> Any:
    """The family's model with these options, in float32, the same at each call."""
    import transformers

    config = getattr(transformers, f"{family.kind}Config")(**options)
    kind = family.kind.removesuffix("Text")
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    return scaled_like_trained(model)


def small(name: str) -> Any:
    """A family's small model in float32."""
    return built(FAMILIES[name], SMALL | FAMILIES[name].small)


@torch.no_grad()
def scaled_like_trained(model: Any) -> Any:
    """Random weights of the sizes that training gives them.

    Embeddings reach the first layer with about the size that layers add, whatever factor comes in
    between; else a token would predict itself, and no layer would matter. Logits are about 3.
    """
    config = model.config
    noise = torch.Generator(next(model.parameters()).device).manual_seed(1)
    factor = getattr(config, "embedding_multiplier", 1.0)
    if config.model_type.startswith("gemma"):
        factor = config.hidden_size**0.5
    for name, p in model.named_parameters():
        if "lm_head" in name or ("embed" in name and config.tie_word_embeddings):
            size = 3.0 * getattr(config, "logits_scaling", 1.0) * p.shape[1] ** -0.5
            p.normal_(0.0, size, generator=noise)
        elif "embed" in name:
            p.normal_(0.0, 1.0 / factor, generator=noise)
        elif p.dim() > 1:
            # Queries and keys are larger, so that attention has favourites.
            gain = 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv")) else 1.0
            p.normal_(0.0, gain * p.shape[1] ** -0.5, generator=noise)
        elif name.endswith("bias"):
            p.normal_(0.0, 0.1, generator=noise)
        else:  # a norm's weight, near 1, or near 0 where the norm adds 1
            p.add_(torch.empty_like(p).normal_(0.0, 0.2, generator=noise))
    return model
