"""A causal language model as a policy: packed sequences in, action tokens' log-probs out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludic.errors import ConfigError
from ludic.inference.local.module.view import active_dropout
from ludic.precision import Precision, autocast, sampling_dtype
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWItem
from ludic.sharding.model_parts import (
    backbone_of,
    base_causal_lm,
    config_facts,
    decoder_layers,
    head_of,
    vocabulary_size,
)
from ludic.training.config import AttentionKind, HeadKernels
from ludic.training.types import TokenLogProbs
from ludic.training.update.attention import (
    CannotPack,
    enable_packed_attention,
    packed_arguments,
    restore_attention,
)
from ludic.training.update.graphed import PassGraphs
from ludic.training.update.layout import lay_out
from ludic.training.update.logprobs import (
    LogitRule,
    action_logits,
    token_logprobs,
)
from ludic.training.update.packing import MicroBatch, pack
from ludic.training.update.planning import Cost
from ludic.training.update.sharing import gather

_log = logging.getLogger("ludic.training")
_scoring: ContextVar[bool] = ContextVar("ludic_scoring", default=False)


class Policy(nn.Module):
    """Splits a model into backbone and head, so that whole logits are never made.

    `model` is a transformers causal LM, or a PEFT wrapper of one; it stays usable as it was, and
    a sampler may share it. Under FSDP2 this module is the root. Where `packs` is False, the rows
    of a micro-batch go through the model's own forward pass, one after another. With the precision
    `mixed` the backbone runs under autocast, and the head multiplies in bfloat16.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        attention: AttentionKind = "auto",
        gradient_checkpointing: bool = False,
        compile_layers: bool = False,
        precision: Precision | None = None,
        head_kernels: HeadKernels = "auto",
        graphs: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.packs = self.sharing = True
        self.precision, self.head_kernels = precision, head_kernels
        causal = base_causal_lm(model)
        self.rule = logit_rule(causal)
        try:
            enable_packed_attention(causal, attention)
        except CannotPack as exc:
            self.one_at_a_time(exc)
        self.graphs: PassGraphs | None = None
        if gradient_checkpointing or compile_layers:
            for layer in decoder_layers(model):
                _wrap_layer(layer, gradient_checkpointing, compile_layers)
        elif graphs and self._has_graphs(attention):
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
        if self.graphs is not None and not logits and torch.is_grad_enabled() and self.packs:
            replayed = None if active_dropout(self.model) else self.graphs(micro)
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
        if self.packs:
            return backbone(  # type: ignore[no-any-return]
                input_ids=micro.input_ids[None],
                position_ids=micro.position_ids[None],
                use_cache=False,
                **packed_arguments(micro.cu_seqlens, micro.lengths, micro.keys),
            )[0][0]
        if micro.keys is not None:
            raise ValueError("rows that are computed one at a time cannot share tokens")
        hidden = []
        for row in torch.split(micro.input_ids, list(micro.lengths)):
            forget_longer_rows(backbone)
            hidden.append(backbone(input_ids=row[None], use_cache=False)[0][0])
        return torch.cat(hidden)

    @property
    def shares(self) -> bool:
        """Whether tokens that several rows begin with may be computed once: not under dropout,
        which every row draws for itself."""
        return self.packs and self.sharing and active_dropout(self.model) is None

    def one_at_a_time(self, why: object) -> None:
        """From now on computes rows alone, by the model's own attention, and says why."""
        self.packs = False
        causal = base_causal_lm(self.model)
        restore_attention(causal)
        name = type(causal).__name__
        _log.warning("%s: rows are not packed but computed one at a time: %s", name, why)

    def score(
        self, micro: MicroBatch, *, entropy: bool = False, logits: bool = False
    ) -> TokenLogProbs:
        """`forward`, with names."""
        return TokenLogProbs(*self(micro, entropy, logits))


def logit_rule(causal: nn.Module) -> LogitRule:
    """What the family does to its logits, as far as its configuration says."""
    facts = config_facts(causal)
    scale = float(facts.get("logit_scale") or 1.0) / float(facts.get("logits_scaling") or 1.0)
    return LogitRule(scale, facts.get("final_logit_softcapping"))


@torch.no_grad()
def check_split(model: nn.Module, device: torch.device) -> None:
    """Compares the split with the model's own logits on a few tokens, and looks for causality.

    Raises `ConfigError` for a family that treats hidden states or logits in ways unknown here, and
    for one whose tokens see those behind them.
    """
    causal = base_causal_lm(model)
    name = type(causal).__name__
    backbone, head = backbone_of(causal), head_of(causal)
    ids = _random_ids(causal, 8, device)[None]
    own = causal(input_ids=ids, use_cache=False).logits.float()
    try:
        ours = logit_rule(causal)(head(backbone(input_ids=ids, use_cache=False)[0])).float()
    except RuntimeError as exc:
        raise ConfigError(f"{name}: head(backbone(x)) does not work: {exc}") from exc
    if own.shape != ours.shape or not torch.allclose(own, ours, rtol=1e-2, atol=1e-2):
        raise ConfigError(
            f"{name}: head(backbone(x)) differs from the model's own logits; this family does "
            "something in between that the trainer cannot reproduce"
        )
    ids[0, -1].add_(1).remainder_(vocabulary_size(causal))
    other = causal(input_ids=ids, use_cache=False).logits.float()
    if not torch.allclose(own[:, :-1], other[:, :-1], rtol=1e-2, atol=1e-2):
        raise ConfigError(
            f"{name}: logits change with the tokens behind them, so it is no causal language "
            "model as it is configured (is_decoder=True is missing, perhaps)"
        )


@torch.no_grad()
def check_packing(policy: Policy, device: torch.device, longest: int = 2048) -> None:
    """Packs two random rows, and has rows computed one at a time where that changes log-probs.

    It does where the model's attention is of another kind than the packed one, and where a state
    runs along the sequence past its boundaries (convolutions, recurrences): then a row's log-probs
    depend on the row before it. What rounding may do is measured on the model itself. A rotary
    embedding that depends on the longest row is told by the configuration; `longest` is the longest
    there will be. Rows that begin alike are tried too, and share nothing where that goes wrong.
    """
    why = _leak(policy, device, longest) if policy.packs else None
    if why:
        policy.one_at_a_time(why)
    reshard = getattr(policy, "reshard", None)  # under FSDP2, which waits for a backward pass
    if reshard is not None:
        reshard()


_FAILURES = (CannotPack, TypeError, ValueError, RuntimeError, IndexError, AttributeError)


def _leak(policy: Policy, device: torch.device, longest: int) -> str | None:
    """How packing changes log-probs; None where it does not."""
    causal = base_causal_lm(policy.model)
    facts = config_facts(causal)
    if _rope_threshold(facts) < longest:
        return "their rotary embedding depends on the longest of them"
    windows = [window + 4 for window in _windows(facts) if window + 4 <= longest]
    first, second = min(15, longest - 1), min(max([20, *windows]), longest)
    ids = [_random_ids(causal, n, torch.device("cpu")) for n in (first, second)]
    other_first = (ids[0] + 1) % vocabulary_size(causal)
    longer = torch.cat([ids[0], ids[1][first:]])  # the first row, and tokens behind it
    layout = lay_out(make_batch(map(_item, (*ids, other_first, longer))))
    packed, shifted, *alone = (
        pack(layout, indices).to(device) for indices in ((0, 1), (2, 1), (0,), (1,), (3,))
    )
    try:
        found, beside_another = (policy.score(rows).logprobs for rows in (packed, shifted))
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as exc:
        return f"{type(exc).__name__}: {exc}"
    policy.packs = False
    own_first, own_second, own_longer = (policy.score(row).logprobs for row in alone)
    policy.packs = True
    # What rounding does to this model in its type: the same tokens in a row of another length.
    rounding = _mean_gap(own_longer[: first - 1], own_first)
    dtype = (
        next(causal.parameters()).dtype
        if policy.precision is None
        else sampling_dtype(policy.precision)
    )
    eps = max(torch.finfo(dtype).eps, 1e-3)
    apart = _mean_gap(found, torch.cat([own_first, own_second]))
    if apart > 8 * max(eps, rounding):
        return f"packing changes their log-probs by {apart:.2g} on average"
    # The same shapes and the same second row: only what the first row says is another.
    leaked = _mean_gap(found[first - 1 :], beside_another[first - 1 :])
    if leaked > max(eps, 3 * rounding):
        return f"packed, a row's log-probs change by {leaked:.2g} with what stands before it"
    if why := _wrongly_shared(policy, ids[1], device, eps, rounding):
        policy.sharing = False
        name = type(causal).__name__
        _log.info("%s: tokens that rows begin with are computed for each: %s", name, why)
    return None


def _wrongly_shared(
    policy: Policy, ids: Tensor, device: torch.device, eps: float, rounding: float
) -> str | None:
    """How log-probs change where rows share what they begin with; None where they do not."""
    own = min(5, len(ids) - 1)
    rows = [ids.clone() for _ in range(3)]
    rows[1][-own:] += 1
    rows[2][-own:] += 2
    for row, first in zip(rows, (0, 1, 0), strict=True):  # the second row comes last in their order
        row %= vocabulary_size(base_causal_lm(policy.model))
        row[-own] = first
    layout = lay_out(make_batch(map(_item, rows)))
    whole = policy.score(pack(layout, (0, 1)).to(device)).logprobs
    try:
        found, beside_another = (
            policy.score(pack(layout, pair, share=True).to(device)).logprobs
            for pair in ((0, 1), (2, 1))
        )
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as exc:
        return f"{type(exc).__name__}: {exc}"
    apart = _mean_gap(found, whole)
    if apart > 8 * max(eps, rounding):
        return f"sharing changes their log-probs by {apart:.2g} on average"
    second = len(ids) - 1
    leaked = _mean_gap(found[second:], beside_another[second:])
    if leaked > max(eps, 3 * rounding):
        return f"a row's log-probs change by {leaked:.2g} with the end of another"
    return None


def _mean_gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())


def forget_longer_rows(model: nn.Module) -> None:
    """Takes a "dynamic" rotary embedding, which stays as stretched as its longest row was, back to
    where it began."""
    rotary: Any
    for rotary in model.modules():
        if getattr(rotary, "rope_type", None) == "dynamic":
            rotary.max_seq_len_cached = rotary.original_max_seq_len
            rotary.inv_freq = rotary.original_inv_freq.to(rotary.inv_freq.device)


def _windows(facts: Mapping[str, Any]) -> list[int]:
    """How far the model's layers look back, where its configuration says."""
    names = ("sliding_window", "attention_chunk_size", "attention_window_size")
    return [facts[name] for name in names if isinstance(facts.get(name), int)]


def _rope_threshold(facts: Mapping[str, Any]) -> int:
    """The length above which the rotary embedding changes."""
    rope = facts.get("rope_parameters") or {}
    kinds = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    lengths = [sys.maxsize]
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            lengths.append(kind["original_max_position_embeddings"])
        elif kind.get("rope_type") == "dynamic":
            lengths.append(facts["max_position_embeddings"])
    return min(lengths)


def _random_ids(causal: nn.Module, length: int, device: torch.device) -> Tensor:
    gen = torch.Generator().manual_seed(length)
    return torch.randint(vocabulary_size(causal), (length,), generator=gen).to(device)


def _item(ids: Tensor) -> SAWItem:
    """A row of which all tokens but the first are actions."""
    mask = np.ones(len(ids), np.int8)
    return SAWItem(ids.numpy(), mask, np.concatenate([np.zeros(1, np.int8), mask[1:]]), 1.0)


def attention_cost(model: nn.Module) -> Cost:
    """How attention compares with the rest of the arithmetic, for balancing micro-batches."""
    causal = base_causal_lm(model)
    facts = config_facts(causal)
    layers, width = (facts.get(k) or 0 for k in ("num_hidden_layers", "hidden_size"))
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
