"""How many tokens a forward pass takes if nobody says: as many as fit with room to spare.

One large micro-batch is quicker than several small ones, which a GPU spends on launching kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ludic.plumbing.model_parts import config_facts
from ludic.sharding.world import World
from ludic.training.config import TrainerConfig

USUAL, MOST = 16_384, 131_072
_SHARE = 0.4
"""Of the memory that is free when the trainer is made; the engine has taken its own by then."""
_OPTIMIZER_BYTES = 16
"""For each trained parameter: masters, two moments, a gradient."""
_MARGIN = 1.25
"""For the head's logits, and for what an estimate of the activations leaves out."""


def default_budget(model: nn.Module, cfg: TrainerConfig, world: World) -> int:
    """Returns the tokens of one forward pass. Several ranks must agree, so they take what a CPU
    takes; one GPU takes more where an estimate of its activations says that they fit."""
    least = max(USUAL, cfg.max_seq_len)
    if world.size > 1 or world.device.type != "cuda":
        return least
    free, _ = torch.cuda.mem_get_info(world.device)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    item = next(model.parameters()).element_size()
    per_token = activation_bytes(config_facts(model), item, mixed=cfg.precision == "mixed")
    if per_token is None or cfg.gradient_checkpointing:
        return least
    fitting = int(_SHARE * (free - _OPTIMIZER_BYTES * trained) / per_token)
    return max(least, min(fitting, MOST))


def trainer_bytes(model: nn.Module, cfg: TrainerConfig, *, ranks: int = 1) -> int | None:
    """Estimates what a trainer will take of its device beside the weights: masters, moments and
    gradients, and the activations of one forward pass; None for a model that does not say how
    large it is."""
    facts, weight = config_facts(model), next(model.parameters())
    per_token = activation_bytes(facts, weight.element_size(), mixed=cfg.precision == "mixed")
    if per_token is None:
        return None
    if cfg.gradient_checkpointing:  # one layer's, and what each layer was given
        layers = facts["num_hidden_layers"]
        per_token = per_token // layers + layers * facts["hidden_size"] * weight.element_size()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tokens = cfg.micro_token_budget or max(USUAL, cfg.max_seq_len)
    return _OPTIMIZER_BYTES * trained // ranks + int(_MARGIN * per_token * tokens)


def activation_bytes(facts: dict[str, Any], item: int, *, mixed: bool) -> int | None:
    """Estimates what the layers keep of a token for the backward pass, for weights of `item` bytes;
    None for a model that does not say how large it is."""
    sizes = [facts.get(k) for k in ("num_hidden_layers", "hidden_size", "intermediate_size")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    layers, hidden, inner = sizes
    return int(layers * (16 * hidden + 2 * inner) * (3 if mixed else item))  # type: ignore[operator]
