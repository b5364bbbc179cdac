"""Finds the numbers of rows that give the same bits on this machine.

A linear layer's result for a row may depend on how many rows are computed with it, because the
library picks its kernel by shape. So a few sizes are tested when an engine is made, and those that
agree to the last bit may be mixed. The contents of the other rows must not matter either; they do
in a mixture of experts, where the number of rows per expert varies, and the test looks for that
too.

The model's own values may hide a difference: a kernel that rounds the bias elsewhere looks like any
other until training has moved the bias away from zero. So small and constant parameters are
replaced by random values for the test.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.inference.local.attention import AttentionCall
from ludic.inference.local.view import Forward

_LARGEST = ((2_000_000, 1024), (20_000_000, 256))
"""Up to so many parameters, steps of so many rows; larger models are as quick with 64."""
_FEW = 3
"""Rows amid padding: so few that most experts which they choose are theirs alone."""
_SMALL = 1 << 17
"""Parameters of up to so many elements are tried with random values; larger ones as they are."""


class _OwnKeyLayout:
    """Every row attends to itself alone: whatever else a model does is then seen row by row.

    `seen` holds all queries, keys and values, since the sum below rounds their last bits away.
    """

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def attend(self, call: AttentionCall) -> Tensor:
        q, v = call.q, call.v
        self.seen += [x.flatten(1).float() for x in (q, call.k, v)]
        group = q.shape[1] // v.shape[1]
        return v.repeat_interleave(group, 1) + 0.001 * q


def with_random_values(view: nn.Module) -> nn.Module:
    """Puts random values in place of `view`'s small and constant parameters, from the same noise in
    every process. Only the view changes: it gets its own parameter dictionaries."""
    generator = torch.Generator().manual_seed(0)
    substitutes: dict[int, nn.Parameter] = {}

    def random_values(p: nn.Parameter) -> nn.Parameter:
        if not p.is_floating_point() or (p.numel() > _SMALL and p.amin() != p.amax()):
            return p
        if id(p) not in substitutes:
            # About their mean, so that a norm still scales by about one.
            noise = torch.randn(p.shape, generator=generator) / p.shape[-1:].numel() ** 0.5
            substitutes[id(p)] = nn.Parameter(p.detach().mean() + noise.to(p), requires_grad=False)
        return substitutes[id(p)]

    for module in view.modules():
        module.__dict__["_parameters"] = {
            name: p if p is None else random_values(p) for name, p in module._parameters.items()
        }
    return view


def candidate_sizes(parameters: int, max_slots: int) -> tuple[int, ...]:
    """Sizes worth trying: small ones for few requests, large ones for prompts."""
    largest = next((rows for size, rows in _LARGEST if parameters <= size), 64)
    return tuple(sorted({16, 64, min(256, largest), largest, max(16, -(-max_slots // 16) * 16)}))


@torch.inference_mode()
def equal_row_sizes(
    forward: Forward, sizes: tuple[int, ...], vocab: int, max_position: int, device: torch.device
) -> tuple[int, ...]:
    """Those of `sizes` whose rows are the same bits as in the largest, wherever they stand and
    whatever the other rows hold.

    Raises `ConfigError` when not even one size gives the same bits at any place in the batch, or
    when a row's bits depend on the others.
    """
    largest = max(sizes)
    ids = (torch.arange(largest, device=device) * 7919) % vocab
    at = (torch.arange(largest, device=device) * 31) % max_position
    wanted = _results(forward, ids, at)
    turned = _results(forward, ids.roll(5), at.roll(5)).roll(-5, 0)
    if not _same(wanted, turned):
        raise _not_promised("on this machine a row's bits depend on its place in the batch")
    smaller = [n for n in sizes if n < largest]
    equal = [n for n in smaller if _same(_results(forward, ids[:n], at[:n]), wanted[:n])]
    equal.append(largest)
    for n in equal:
        few = torch.arange(1, n, max(1, n // _FEW), device=device)[:_FEW]
        alone, alone_at = torch.zeros_like(ids[:n]), torch.zeros_like(at[:n])
        alone[few], alone_at[few] = ids[few], at[few]
        if not _same(_results(forward, alone, alone_at)[few], wanted[few]):
            raise _not_promised(
                "a row's bits depend on the rows computed with it, as in a mixture of experts"
            )
    return tuple(equal)


def _not_promised(why: str) -> ConfigError:
    return ConfigError(
        f"{why}, so the deterministic mode cannot be promised: set deterministic=False"
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _results(forward: Forward, ids: Tensor, at: Tensor) -> Tensor:
    """All that must agree, one row for each token; the sampler's reductions are part of it."""
    layout = _OwnKeyLayout()
    logits = forward(ids[None], at[None], layout).float()
    return torch.cat([logits, F.softmax(logits, -1), *layout.seen], -1)
