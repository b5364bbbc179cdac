"""Tests of a new trainer's or scorer's model, on a few random tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.plumbing.model_parts import (
    LogitRule,
    backbone_of,
    base_causal_lm,
    config_facts,
    head_of,
    logit_rule,
    vocabulary_size,
)
from ludic.plumbing.precision import sampling_dtype
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWItem
from ludic.training.types import Loss, parts_of
from ludic.training.update.attention import CannotPack, forget_longer_rows
from ludic.training.update.packing import MicroBatch, lay_out, pack
from ludic.training.update.policy import Policy

_log = logging.getLogger("ludic.training")
_LARGEST_LOGIT = 100.0


def check_loss(loss: Loss, model: nn.Module) -> None:
    """Raises `ConfigError` for a loss with parameters of its own: only those of `model` are
    trained."""
    trained = set(map(id, model.parameters()))
    for part in parts_of(loss):
        held = (part, *getattr(part, "__dict__", {}).values())
        named = [pair for m in held if isinstance(m, nn.Module) for pair in m.named_parameters()]
        if own := [name for name, p in named if p.requires_grad and id(p) not in trained]:
            shown = [*own[:3], "…"] if len(own) > 4 else own  # a whole model has hundreds
            raise ConfigError(
                f"{type(part).__name__} has the parameters {shown}, and the trainer trains only "
                "the model's: make them part of the model, or freeze them: requires_grad_(False)"
            )


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Has the module compute as in eval mode: two passes that are compared must not be random."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def check_split(model: nn.Module, device: torch.device) -> None:
    """Compares the split with the model's own logits on a few tokens, and looks for causality.

    Raises `ConfigError` for a family that treats hidden states or logits in ways unknown here, and
    for one whose tokens see those behind them. Logits of a few random tokens may be too small to
    show a soft cap, so what follows the head is tried on logits up to 100, too.
    """
    causal = base_causal_lm(model)
    name = type(causal).__name__
    ids = _random_ids(causal, 8, device)[None]
    rule = logit_rule(config_facts(causal))
    with without_dropout(model):
        own = causal(input_ids=ids, use_cache=False).logits
        if not _splits(causal, rule, ids, own):
            raise ConfigError(
                f"{name}: head(backbone(x)) differs from the model's own logits; this family does "
                "something in between that the trainer cannot reproduce"
            )
        if not _follows(causal, rule, ids):
            raise ConfigError(
                f"{name}: the model does something to the head's logits that its configuration "
                f"does not say, or that the trainer does not know; it would take {rule}"
            )
        changed = ids.clone()
        changed[0, -1].add_(1).remainder_(vocabulary_size(causal))
        other = causal(input_ids=changed, use_cache=False).logits
    if not _close(own[:, :-1], other[:, :-1]):
        raise ConfigError(
            f"{name}: logits change with the tokens behind them, so it is no causal language "
            "model as it is configured (is_decoder=True is missing, perhaps)"
        )


def _splits(causal: nn.Module, rule: LogitRule, ids: Tensor, own: Tensor) -> bool:
    forget_longer_rows(causal)
    try:
        ours = rule(head_of(causal)(backbone_of(causal)(input_ids=ids, use_cache=False)[0]))
    except RuntimeError as exc:
        raise ConfigError(
            f"{type(causal).__name__}: head(backbone(x)) does not work: {exc}"
        ) from exc
    return own.shape == ours.shape and _close(own, ours)


def _follows(causal: nn.Module, rule: LogitRule, ids: Tensor) -> bool:
    """Whether the model does to its head's output what `rule` says, over the range of logits."""
    size = vocabulary_size(causal)
    logits = torch.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, size, device=ids.device)

    def instead(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return logits.expand(output.shape).clone()

    handle = head_of(causal).register_forward_hook(instead)
    try:
        found = causal(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return found.shape[-1] == size and _close(found, rule(logits).expand(found.shape))


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether the two are the same but for the rounding of a few operations in their type."""
    eps = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    a, b = a.float(), b.float()
    return bool((a - b).abs().max() <= 32 * eps * torch.maximum(a.abs().max(), b.abs().max()))


@torch.no_grad()
def check_packing(policy: Policy, device: torch.device, longest: int = 2048) -> None:
    """Packs two random rows, and has rows computed one at a time where that changes log-probs.

    It does where the model's attention is of another kind than the packed one, and where a state
    runs along the sequence past its boundaries (convolutions, recurrences): then a row's log-probs
    depend on the row before it. What rounding may do is measured on the model itself, without
    dropout. `longest` is the longest row there will be: windows beyond it are not tried. Rows that
    begin alike are tried too, and share nothing where that goes wrong.
    """
    with without_dropout(policy.model):
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
    longest = min(longest, policy.rope_threshold)
    if longest < 3:
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
    scores = _scores(policy, packed, shifted)
    if isinstance(scores, str):
        return scores
    together, beside_another = scores
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
    own = torch.cat([own_first, own_second])
    apart = _mean_gap(together, own)
    # Logits are rounded by a share of their size, which random ids make large; and the rows alone
    # were computed by one kernel, packed ones by another.
    limit = 8 * max(eps, rounding, torch.finfo(dtype).eps * own.abs().mean().item() / 4)
    if apart > limit:
        return f"packing changes their log-probs by {apart:.2g} on average"
    # The same shapes and the same second row: only what the first row says is another.
    leaked = _mean_gap(together[first - 1 :], beside_another[first - 1 :])
    if leaked > (least := max(eps, 3 * rounding)):
        return f"packed, a row's log-probs change by {leaked:.2g} with what stands before it"
    if why := _wrongly_shared(policy, ids[1], device, limit, least):
        policy.sharing = False
        name = type(causal).__name__
        _log.info("%s: tokens that rows begin with are computed for each: %s", name, why)
    return None


def _wrongly_shared(
    policy: Policy, ids: Tensor, device: torch.device, limit: float, least: float
) -> str | None:
    """How log-probs change where rows share what they begin with, by more than `limit`, or by more
    than the `least` with another's end; None where they do not."""
    own = min(5, len(ids) - 1)
    rows = [ids.clone() for _ in range(3)]
    rows[1][-own:] += 1
    rows[2][-own:] += 2
    for row, first in zip(rows, (0, 1, 0), strict=True):  # the second row comes last in their order
        row %= vocabulary_size(base_causal_lm(policy.model))
        row[-own] = first
    layout = lay_out(make_batch(map(_item, rows)))
    whole = policy.score(pack(layout, (0, 1)).to(device)).logprobs
    shared = (pack(layout, pair, share=True).to(device) for pair in ((0, 1), (2, 1)))
    scores = _scores(policy, *shared)
    if isinstance(scores, str):
        return scores
    sharing, beside_another = scores
    apart = _mean_gap(sharing, whole)
    if apart > limit:
        return f"sharing changes their log-probs by {apart:.2g} on average"
    second = len(ids) - 1
    leaked = _mean_gap(sharing[second:], beside_another[second:])
    if leaked > least:
        return f"a row's log-probs change by {leaked:.2g} with the end of another"
    return None


def _scores(policy: Policy, *micro_batches: MicroBatch) -> list[Tensor] | str:
    """The log-probs of each; where the model cannot compute them, why."""
    try:
        return [policy.score(micro).logprobs for micro in micro_batches]
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as exc:
        return f"{type(exc).__name__}: {exc}"


def _mean_gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())


def _windows(facts: Mapping[str, Any]) -> list[int]:
    """How far the model's layers look back, where its configuration says."""
    names = ("sliding_window", "attention_chunk_size", "attention_window_size")
    return [facts[name] for name in names if isinstance(facts.get(name), int)]


def _random_ids(causal: nn.Module, length: int, device: torch.device) -> Tensor:
    gen = torch.Generator().manual_seed(length)
    return torch.randint(vocabulary_size(causal), (length,), generator=gen).to(device)


def _item(ids: Tensor) -> SAWItem:
    """A row of which all tokens but the first are actions."""
    mask = np.ones(len(ids), np.int8)
    return SAWItem(ids.numpy(), mask, np.concatenate([np.zeros(1, np.int8), mask[1:]]), 1.0)
