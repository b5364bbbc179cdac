"""A causal language model as a policy: packed sequences in, action tokens' log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludic.errors import ConfigError
from ludic.sharding.model_parts import (
    backbone_of,
    base_causal_lm,
    decoder_layers,
    head_of,
    vocabulary_size,
)
from ludic.training.types import TokenLogProbs
from ludic.training.update.attention import AttentionKind, enable_packed_attention, packed_arguments
from ludic.training.update.logprobs import LogitRule, action_logits, token_logprobs
from ludic.training.update.packing import Cost, MicroBatch

_scoring: ContextVar[bool] = ContextVar("ludic_scoring", default=False)


class Policy(nn.Module):
    """Splits a model into backbone and head, so that whole logits are never made.

    `model` is a transformers causal LM, or a PEFT wrapper of one; it stays usable as it was, and
    a sampler may share it. Under FSDP2 this module is the root.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        attention: AttentionKind = "auto",
        gradient_checkpointing: bool = False,
        compile_layers: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        causal = base_causal_lm(model)
        self.rule = logit_rule(causal)
        enable_packed_attention(causal, attention)
        if gradient_checkpointing or compile_layers:
            for layer in decoder_layers(model):
                _wrap_layer(layer, gradient_checkpointing, compile_layers)

    def forward(
        self, micro: MicroBatch, entropy: bool = False, logits: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs, entropies and logits of the action tokens; a plain tuple, for FSDP's hooks."""
        causal = base_causal_lm(self.model)
        with _scoring_pass():
            hidden = backbone_of(causal)(
                input_ids=micro.input_ids[None],
                position_ids=micro.position_ids[None],
                use_cache=False,
                **packed_arguments(micro.cu_seqlens, micro.max_seqlen),
            )[0][0]
        actions = hidden.index_select(0, micro.action_positions)
        head = head_of(causal)
        logprobs, entropies = token_logprobs(
            actions,
            head,
            micro.target_ids,
            micro.temperatures,
            kept=micro.kept,
            rule=self.rule,
            entropy=entropy,
        )
        whole = None
        if logits:
            whole = action_logits(
                actions, head, micro.temperatures, kept=micro.kept, rule=self.rule
            )
        return logprobs, entropies, whole

    def score(
        self, micro: MicroBatch, *, entropy: bool = False, logits: bool = False
    ) -> TokenLogProbs:
        """`forward`, with names."""
        return TokenLogProbs(*self(micro, entropy, logits))


def logit_rule(causal: nn.Module) -> LogitRule:
    """What the family does to its logits, as far as its configuration says."""
    config: Any = getattr(causal, "config", None)
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return LogitRule(scale, getattr(config, "final_logit_softcapping", None))


@torch.no_grad()
def check_split(model: nn.Module, device: torch.device) -> None:
    """Compares the split with the model's own logits on a few tokens.

    Families that treat hidden states or logits in ways unknown here are refused this way.
    """
    causal = base_causal_lm(model)
    vocab = vocabulary_size(causal)
    ids = torch.arange(8, device=device)[None] % vocab
    bounds = torch.tensor([0, 8], dtype=torch.int32, device=device)
    places = torch.arange(8, device=device)[None]
    extra = packed_arguments(bounds, 8)
    own = causal(input_ids=ids, position_ids=places, use_cache=False, **extra).logits
    hidden = backbone_of(causal)(input_ids=ids, position_ids=places, use_cache=False, **extra)[0]
    ours = logit_rule(causal)(head_of(causal)(hidden))
    if not torch.allclose(own.float(), ours.float(), rtol=1e-2, atol=1e-2):
        gap = (own.float() - ours.float()).abs().max().item()
        raise ConfigError(
            f"{type(causal).__name__}: head(backbone(x)) differs from the model's own logits by "
            f"{gap:.3g}; this family does something in between that the trainer cannot reproduce"
        )


def attention_cost(model: nn.Module) -> Cost:
    """How attention compares with the rest of the arithmetic, for balancing micro-batches."""
    causal = base_causal_lm(model)
    config: Any = getattr(causal, "config", None)
    layers, width = (getattr(config, k, 0) or 0 for k in ("num_hidden_layers", "hidden_size"))
    parameters = sum(p.numel() for p in causal.parameters())
    return Cost(layers * width / max(parameters, 1))


@contextmanager
def _scoring_pass() -> Iterator[None]:
    token = _scoring.set(True)
    try:
        yield
    finally:
        _scoring.reset(token)


def _wrap_layer(layer: nn.Module, checkpointing: bool, compiled: bool) -> None:
    """Changes the layer for the trainer's passes only: a sampler sharing it sees the original."""
    original: Callable[..., Any] = getattr(layer.forward, "ludic_original", layer.forward)
    training = torch.compile(original) if compiled else original

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not _scoring.get():
            return original(*args, **kwargs)
        if checkpointing and torch.is_grad_enabled():
            return checkpoint(training, *args, use_reentrant=False, **kwargs)
        return training(*args, **kwargs)

    forward.ludic_original = original  # type: ignore[attr-defined]
    layer.forward = forward
