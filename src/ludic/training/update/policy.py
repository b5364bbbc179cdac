"""A causal language model as a policy: packed sequences in, action tokens' log-probs out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludic.plumbing.model_parts import (
    active_dropout,
    backbone_of,
    base_causal_lm,
    config_facts,
    decoder_layers,
    head_of,
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
from ludic.training.update.graphed import PassGraphs
from ludic.training.update.logprobs import action_logits, logit_rule, token_logprobs
from ludic.training.update.packing import Layout, MicroBatch, gather

_log = logging.getLogger("ludic.training")
_scoring: ContextVar[bool] = ContextVar("ludic_scoring", default=False)


class Policy(nn.Module):
    """Splits a model into backbone and head, so that whole logits are never made.

    `model` is a transformers causal LM, or a PEFT wrapper of one; it stays usable as it was, and
    a sampler may share it. Under FSDP2 this module is the root. Where `packs` is False, the rows
    of a micro-batch go through the model's own forward pass, one after another; so do those of one
    with a row above `longest_packed`. With the precision `mixed` the backbone runs under autocast,
    and the head multiplies in bfloat16. `graphs`: passes may be replayed as CUDA graphs.
    """

    def __init__(
        self, model: nn.Module, cfg: TrainerConfig | None = None, *, graphs: bool = False
    ) -> None:
        super().__init__()
        cfg = cfg or TrainerConfig()
        self.model = model
        self.packs = self.sharing = True
        self.precision, self.head_kernels = cfg.precision, cfg.head_kernels
        causal = base_causal_lm(model)
        facts = config_facts(causal)
        self.rule, self.rope_threshold = logit_rule(facts), rope_threshold(facts)
        self._attention = PackedAttention(causal, cfg.attention)
        try:
            self._attention.enable()
        except CannotPack as exc:
            self.one_at_a_time(exc)
        self.graphs: PassGraphs | None = None
        if cfg.gradient_checkpointing or cfg.compile:
            for layer in decoder_layers(model):
                _wrap_layer(layer, cfg.gradient_checkpointing, cfg.compile)
        elif graphs and self._has_graphs(cfg.attention):
            layers = len(decoder_layers(model))
            self.graphs = PassGraphs(self._logprobs_and_entropies, model, layers, capture=True)

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
        if self.graphs is not None and not logits and torch.is_grad_enabled():
            alone = micro.longest > self.longest_packed or active_dropout(self.model)
            replayed = None if alone else self.graphs(micro)
            if replayed is not None:
                return replayed[0], replayed[1] if entropy else None, None
        return self._compute(micro, entropy, logits)

    def _logprobs_and_entropies(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        logprobs, entropies, _ = self._compute(micro, True, False)
        assert entropies is not None
        return logprobs, entropies

    def _compute(
        self, micro: MicroBatch, entropy: bool, logits: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        causal = base_causal_lm(self.model)
        with _scoring_pass(), autocast(self.precision, micro.input_ids.device):
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
        if not self.packs or active_dropout(self.model, but="lora_dropout"):
            return 0
        return self.rope_threshold

    @property
    def shares(self) -> bool:
        """Whether tokens that several rows begin with may be computed once: not under dropout,
        which every row draws for itself."""
        return self.packs and self.sharing and active_dropout(self.model) is None

    def shares_in(self, layout: Layout, indices: Iterable[int]) -> bool:
        """Whether these rows, in one micro-batch, may share what they begin with."""
        return self.shares and max(layout.order.lengths[i] for i in indices) <= self.longest_packed

    def one_at_a_time(self, why: object) -> None:
        """From now on computes rows alone, by the model's own attention, and says why."""
        self.packs = False
        self._attention.restore()
        name = type(base_causal_lm(self.model)).__name__
        _log.warning("%s: rows are not packed but computed one at a time: %s", name, why)

    def score(
        self, micro: MicroBatch, *, entropy: bool = False, logits: bool = False
    ) -> TokenLogProbs:
        """`forward`, with names."""
        return TokenLogProbs(*self(micro, entropy, logits))


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
