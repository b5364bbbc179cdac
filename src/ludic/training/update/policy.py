"""A causal language model as a policy: packed sequences in, action tokens' log-probs out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludic.errors import ConfigError
from ludic.plumbing.contexts import holding
from ludic.plumbing.llama_layers import can_fuse
from ludic.plumbing.model_parts import (
    Dropouts,
    backbone_of,
    base_causal_lm,
    config_facts,
    decoder_layers,
    head_of,
    logit_rule,
)
from ludic.plumbing.precision import autocast, sampling_dtype
from ludic.training.config import AttentionKind, TrainerConfig
from ludic.training.types import TokenLogProbs
from ludic.training.update.attention import (
    CannotPack,
    PackedAttention,
    forget_longer_rows,
    packed_arguments,
    rope_threshold,
)
from ludic.training.update.fused_layers import adding_to, fused_forward
from ludic.training.update.graphed import PassGraphs
from ludic.training.update.logprobs import action_logits, token_logprobs
from ludic.training.update.packing import Layout, MicroBatch, gather

_log = logging.getLogger("ludic.training")
_scoring: ContextVar[bool] = ContextVar("ludic_scoring", default=False)
_recomputing: ContextVar[bool] = ContextVar("ludic_recomputing", default=False)


class Policy(nn.Module):
    """Splits a model into backbone and head, so that whole logits are never made.

    `model` is a transformers causal LM, or a PEFT wrapper of one; it stays usable as it was, and
    a sampler may share it. Under FSDP2 this module is the root. Where `packs` is False, the rows
    of a micro-batch go through the model's own forward pass, one after another; so do those of one
    with a row above `longest_packed`. With the precision `mixed` the backbone runs under autocast,
    and the head multiplies in bfloat16. `graphs`: passes may be replayed as CUDA graphs.
    `keep_logits` is how many tokens' logits a pass may keep, none where the memory is not planned.
    """

    def __init__(
        self, model: nn.Module, cfg: TrainerConfig | None = None, *, graphs: bool = False
    ) -> None:
        super().__init__()
        cfg = cfg or TrainerConfig()
        self.model = model
        self.packs = self.sharing = True
        self.precision, self.head_kernels = cfg.precision, cfg.head_kernels
        self.keep_logits = cfg.keep_logits or 0
        self._dropouts = Dropouts(model)
        causal = base_causal_lm(model)
        facts = config_facts(causal)
        self.rule, self.rope_threshold = logit_rule(facts), rope_threshold(facts)
        self._attention = PackedAttention(causal, cfg.attention)
        try:
            self._attention.enable()
        except CannotPack as exc:
            self.one_at_a_time(exc)
        self.graphs: PassGraphs | None = None
        self.always_recomputes, self._cfg = bool(cfg.gradient_checkpointing), cfg
        changed = self.always_recomputes or cfg.compile
        for layer in _layers_of(model, needed=changed):
            if changed or hasattr(layer, "ludic_pass") or (cfg.fused_layers and can_fuse(layer)):
                _wrap_layer(layer, cfg)
        if graphs and not changed and self._has_graphs(cfg.attention):
            compute, layers = self._logprobs_and_entropies, len(decoder_layers(model))
            self.graphs = PassGraphs(compute, model, layers, capture=True)

    def _has_graphs(self, attention: AttentionKind) -> bool:
        """Whether a pass takes nothing from the host but what its tensors say: with the kernel for
        sequences of all lengths, on a GPU."""
        first = next(self.model.parameters())
        dtype = first.dtype if self.precision is None else sampling_dtype(self.precision)
        narrow = dtype in (torch.bfloat16, torch.float16)
        return self.packs and first.is_cuda and narrow and attention in ("auto", "varlen")

    def forward(
        self, micro: MicroBatch, entropy: bool = False, logits: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs, entropies and logits of the action tokens; a plain tuple, for FSDP's hooks."""
        launched = logits or _recomputing.get() or not torch.is_grad_enabled()
        if self.graphs is not None and not launched:
            alone = micro.longest > self.longest_packed or self._dropouts.active()
            replayed = None if alone else self.graphs(micro)
            if replayed is not None:
                return replayed[0], replayed[1] if entropy else None, None
        return self._compute(micro, entropy, logits, 0 if logits else self.keep_logits)

    def _logprobs_and_entropies(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        # A graph has gradients of its own, and holds on to what its passes take: no logits, then.
        with adding_to(None):
            logprobs, entropies, _ = self._compute(micro, True, False, 0)
        assert entropies is not None
        return logprobs, entropies

    def _compute(
        self, micro: MicroBatch, entropy: bool, logits: bool, keep_logits: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        causal = base_causal_lm(self.model)
        with holding(_scoring, True), autocast(self.precision, micro.input_ids.device):
            hidden = self._hidden(micro)
        if micro.keys is None:
            actions = hidden.index_select(0, micro.action_positions)
        else:  # one place may predict the actions of several rows
            actions = gather(hidden, micro.action_positions)
        head = head_of(causal)
        narrow = torch.bfloat16 if self.precision == "mixed" else None
        logprobs, entropies = token_logprobs(
            actions,
            head,
            micro.target_ids,
            micro.temperatures,
            kept=micro.kept,
            rule=self.rule,
            entropy=entropy,
            narrow=narrow,
            kernels=self.head_kernels,
            keep_logits=keep_logits,
        )
        whole = None
        if logits:
            whole = action_logits(
                actions, head, micro.temperatures, kept=micro.kept, rule=self.rule, narrow=narrow
            )
        return logprobs, entropies, whole

    def _hidden(self, micro: MicroBatch) -> Float[Tensor, "length width"]:
        backbone = backbone_of(base_causal_lm(self.model))
        if micro.longest <= self.longest_packed:
            self._forget_longer_rows(backbone)
            return backbone(  # type: ignore[no-any-return]
                input_ids=micro.input_ids[None],
                position_ids=micro.position_ids[None],
                use_cache=False,
                **packed_arguments(
                    micro.cu_seqlens, micro.lengths, micro.keys, kind=self._attention.kind
                ),
            )[0][0]
        if micro.keys is not None:
            raise ValueError("rows that are computed one at a time cannot share tokens")
        hidden = []
        for row in torch.split(micro.input_ids, list(micro.lengths)):
            self._forget_longer_rows(backbone)
            hidden.append(backbone(input_ids=row[None], use_cache=False)[0][0])
        return torch.cat(hidden)

    def _forget_longer_rows(self, backbone: nn.Module) -> None:
        if self.rope_threshold < sys.maxsize:
            forget_longer_rows(backbone)

    @property
    def longest_packed(self) -> int:
        """The longest row that may be packed with others: 0 where none may.

        Above its threshold a rotary embedding depends on the longest row, so such rows run alone.
        While the base model drops units, all do: packed attention has no dropout. An adapter's
        dropout lies outside of attention.
        """
        if not self.packs or self._dropouts.active(but="lora_dropout"):
            return 0
        return self.rope_threshold

    @property
    def shares(self) -> bool:
        """Whether tokens that several rows begin with may be computed once: not under dropout,
        which every row draws for itself."""
        return self.packs and self.sharing and self._dropouts.active() is None

    def shares_in(self, layout: Layout, indices: Iterable[int]) -> bool:
        """Whether these rows, in one micro-batch, may share what they begin with."""
        return self.shares and max(layout.order.lengths[i] for i in indices) <= self.longest_packed

    def one_at_a_time(self, why: object) -> None:
        """From now on computes rows alone, by the model's own attention, and says why."""
        self.packs = False
        self._attention.restore()
        name = type(base_causal_lm(self.model)).__name__
        _log.warning("%s: rows are not packed but computed one at a time: %s", name, why)

    @contextmanager
    def recomputing(self, on: bool) -> Iterator[None]:
        """Inside, passes keep no activations but the layers' inputs, where `on`."""
        if not on or self.always_recomputes:
            yield
            return
        for layer in _layers_of(self.model, needed=False):
            if not hasattr(layer, "ludic_pass"):
                _wrap_layer(layer, self._cfg)
        with holding(_recomputing, True):
            yield

    def score(
        self, micro: MicroBatch, *, entropy: bool = False, logits: bool = False
    ) -> TokenLogProbs:
        """`forward`, with names."""
        return TokenLogProbs(*self(micro, entropy, logits))


def _layers_of(model: nn.Module, *, needed: bool) -> Iterable[nn.Module]:
    """The decoder layers; none of a model that has no list of them, unless they are needed."""
    try:
        return decoder_layers(model)
    except ConfigError:
        if needed:
            raise
        return ()


class _LayerPass(NamedTuple):
    """How the trainer's passes go through a layer."""

    own: Callable[..., Any]
    training: Callable[..., Any]
    checkpointing: bool


def _wrap_layer(layer: nn.Module, cfg: TrainerConfig) -> None:
    """Changes the layer for the trainer's passes only: a sampler sharing it sees the original, and
    a copy of the layer uses the copy's weights."""
    before: _LayerPass | None = getattr(layer, "ludic_pass", None)
    own: Callable[..., Any]
    if before is not None:
        own = before.own
    elif "forward" in vars(layer):
        own = partial(_without_layer, layer.forward)
    else:
        own = type(layer).forward
    training = torch.compile(own) if cfg.compile else own
    replaced = isinstance(own, partial)  # somebody else has changed what the layer does
    if cfg.fused_layers and not (cfg.compile or replaced) and can_fuse(layer):
        training = partial(fused_forward, own)
    layer.ludic_pass = _LayerPass(own, training, bool(cfg.gradient_checkpointing))  # type: ignore[assignment]
    layer.forward = MethodType(_layer_forward, layer)


def _without_layer(forward: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _layer_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    own, training, checkpointing = layer.ludic_pass
    if not _scoring.get():
        return own(layer, *args, **kwargs)
    if (checkpointing or _recomputing.get()) and torch.is_grad_enabled():
        return checkpoint(training, layer, *args, use_reentrant=False, **kwargs)
    return training(layer, *args, **kwargs)
