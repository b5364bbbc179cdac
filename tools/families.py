"""Which model families the trainer takes, and how: tried on a small random model of each.

python -m tools.families             prints what it finds for every causal family
python -m tools.families llama lfm2  only these
python -m tools.families --write     writes the table into docs/families.md
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch, SAWItem
from ludic.training.algorithms.sft import make_sft
from ludic.training.config import TrainerConfig
from ludic.training.trainer import Trainer
from tools.family_table import FamilyTable, Verdict

LENGTHS = (9, 21)
"""Rows that are tried: the second is longer than every window and threshold in `SMALL`. A third
begins like it."""
SHARED = 13
MOST_PARAMETERS = 10_000_000

_SIZES: tuple[tuple[float, tuple[str, ...]], ...] = (
    (96, ("vocab_size", "vocab_size_per_layer_input")),
    (32, ("hidden_size", "d_model", "n_embd", "embedding_size", "lru_width")),
    (48, ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim")),
    (16, ("moe_intermediate_size", "shared_expert_intermediate_size")),
    (4, ("num_hidden_layers",)),
    (2, ("n_layer", "n_layers", "decoder_layers")),
    (1, ("encoder_layers",)),
    (4, ("num_attention_heads", "n_head", "n_heads")),
    (4, ("decoder_attention_heads", "encoder_attention_heads", "rotary_dim")),
    (2, ("num_key_value_heads",)),
    (8, ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")),
    (16, ("kv_lora_rank", "q_lora_rank")),
    (4, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    (2, ("moe_k", "num_experts_per_tok")),
    (1, ("n_shared_experts", "n_group", "topk_group")),
    (128, ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")),
    (8, ("sliding_window", "attention_chunk_size", "attention_window_size", "chunk_size")),
    (8, ("mamba_chunk_size", "mamba_n_heads", "mamba_num_heads", "mamba_d_head")),
    (8, ("mamba_head_dim", "mamba_d_state", "ssm_state_size", "state_size", "num_heads")),
    (1, ("mamba_n_groups", "n_groups")),
    (2, ("linear_num_key_heads",)),
    (4, ("linear_num_value_heads",)),
    (8, ("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input")),
    (0, ("pad_token_id",)),
    (1, ("bos_token_id",)),
    (2, ("eos_token_id",)),
    (0.2, ("initializer_range", "init_std")),
)
SMALL: dict[str, Any] = {name: size for size, names in _SIZES for name in names}
"""Sizes by the names that configurations give them; a family takes those that it knows."""

NO_DROPOUT = ("attention_dropout", "dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop")
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 6.0, 8.0, 16.0],
    "original_max_position_embeddings": 12,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"expert_ffn_hidden_size": 16, "ffn_hidden_size": 48, "num_layers": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "phi3 with longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 12},
    "llama with dynamic rope": {
        "max_position_embeddings": 12,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
}
"""Settings without which a small model lacks what sets the family apart, and settings that
change how a family computes: the family "with" them has a name of its own."""


@cache
def families() -> tuple[str, ...]:
    """Every causal family of the installed transformers, and the variants."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS}))


def tiny(name: str, sizes: Mapping[str, Any] = SMALL) -> nn.Module:
    """A small random model of the family, in float32, with no dropout."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, changes = name.partition(" with ")[0], VARIANTS.get(name, {})
    build: Any = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    made: Any = CONFIG_MAPPING[kind]
    own = getattr(build, "config_class", None)  # a text model's, where `kind` is a larger model
    made = own if own is not None and "vocab_size" not in made().to_dict() else made
    config = made(**_small(made(), sizes) | changes)
    with torch.device("meta"):
        size = sum(p.numel() for p in build(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters in the smallest form known here")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = build(config)
    return model.float().eval()


def _small(default: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Small values for the sizes that the configuration, or one inside it, has."""
    changes: dict[str, Any] = {}
    for key, value in default.to_dict().items():
        if isinstance(value, dict) and hasattr(part := getattr(default, key), "to_dict"):
            changes[key] = _small(part, sizes)
        elif key in sizes and (value is None or not isinstance(value, (list, dict))):
            changes[key] = sizes[key]
        elif key in NO_DROPOUT:
            changes[key] = 0.0
    heads = ("num_key_value_heads", "num_attention_heads")
    values = default.to_dict()
    if values.get(heads[0]) == values.get(heads[1]) and heads[0] in changes:
        changes[heads[0]] = changes[heads[1]]
    return changes


def tried(name: str) -> Verdict:
    """The verdict on a family: its log-probs through a `Trainer` compared with its own."""
    try:
        model = tiny(name)
        batch = _batch(model)
        own = [_own_logprobs(model, item) for item in batch.items]
    except Exception as exc:
        return Verdict("not built", f"{type(exc).__name__}: {exc}")
    with tempfile.TemporaryDirectory() as folder:
        cfg = TrainerConfig(
            max_seq_len=32, micro_token_budget=64, learning_rate=1e-3, run_dir=folder
        )
        try:
            trainer = Trainer(model=model, algo=make_sft(), batch_source=_Once(batch), cfg=cfg)
        except ConfigError as exc:
            return Verdict("refused", str(exc))
        found = trainer.passes.score(batch)
        gap = max(float(np.abs(a - b).max()) for a, b in zip(found, own, strict=True))
        if not gap < 5e-3:
            return Verdict("wrong", f"log-probs differ from the model's own by {gap:.3g}")
        trainer.train_sync(1)
        trainer.close()
        if trainer.nonfinite_steps:
            return Verdict("wrong", "the gradient is not finite")
        return Verdict("packed" if trainer.policy.packs else "one row at a time")


class _Once:
    def __init__(self, batch: SAWBatch) -> None:
        self.batch = batch

    async def next_batch(self) -> SAWBatch:
        return self.batch


def _batch(model: nn.Module) -> SAWBatch:
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 96, length) for length in LENGTHS]
    rows.append(np.concatenate([rows[1][:SHARED], rng.integers(3, 96, LENGTHS[1] - SHARED)]))
    items = []
    for row in rows:
        mask = np.ones(len(row), np.int8)
        actions = mask.copy()
        actions[0] = 0
        items.append(SAWItem(row, mask, actions, 1.0))
    return make_batch(items)


@torch.no_grad()
def _own_logprobs(model: Any, item: SAWItem) -> np.ndarray[Any, Any]:
    ids = torch.from_numpy(item.input_ids)
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    logp = logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    if not torch.isfinite(logp).all():
        raise ValueError("the model's own log-probs are not finite")
    return logp.numpy()


TABLE = FamilyTable(
    "families",
    "families.md",
    "##",
    {
        "packed": "Packed",
        "one row at a time": "One row at a time",
        "refused": "Refused",
        "not built": "Not tried",
    },
    reasons=("refused", "not built"),
)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    TABLE.command(tried, families, __doc__)
