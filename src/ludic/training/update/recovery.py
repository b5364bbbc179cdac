"""Recovers when a micro-batch does not fit in device memory, by computing it in parts."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ludic.errors import OutOfMemoryError
from ludic.plumbing.model_parts import decoder_layers
from ludic.sharding.world import World, is_out_of_memory, release_memory
from ludic.training.types import Scope
from ludic.training.update.packing import Layout
from ludic.training.update.planning import Cost, rows_together, workload
from ludic.training.update.policy import Policy

_log = logging.getLogger("ludic.training")
Part = tuple[tuple[int, ...], bool]
"""Items of a layout that go through one pass, and whether it counts."""

_FITS, _SPLITS, _RECOMPUTES, _ENDS = range(4)


def _failure(layout: Layout, items: Sequence[int], scope: Scope, recomputes: bool) -> int:
    """What to do about a pass that did not fit."""
    if len(halves(layout, items, scope)) > 1:
        return _SPLITS
    return _ENDS if recomputes else _RECOMPUTES


class Recovery:
    """Runs passes, each again in two halves where it did not fit, and remembers the smaller budget.
    Where passes keep logits, they first stop doing so.

    Rows that cannot be split any further are computed with their activations dropped
    (`Policy.recomputing`), and so are all of their size from then on. If that does not fit either,
    `OutOfMemoryError` is raised. The first time is worth a warning.

    Ranks split together. A rank that runs out of memory in a forward pass, in the head or in the
    loss goes through the rest of the pass's collectives with empty hands, and tells the others
    before any of them begins the backward pass. That one cannot be left halfway: its gradients are
    sums over the ranks. So each rank first makes sure that it can get what earlier ones took, and
    all split where one cannot. A backward pass that runs out of memory all the same ends the run;
    on a single device it is computed again like any other.
    """

    def __init__(self, policy: Policy, world: World, budget: int, *, on: bool = True) -> None:
        self.policy, self.world = policy, world
        self.budget = self.first_budget = budget
        self.recomputed_from = sys.maxsize
        """Passes of so many tokens are computed with their activations dropped."""
        self._told = False
        self._bytes_per_token = 0.0
        self._entered = 0
        self._sharded = isinstance(policy, FSDPModule)
        # Without this FSDP2, before torch 2.13, does not forget a pass that was left halfway.
        self._on = on and (not self._sharded or hasattr(policy, "reset_iter_state"))
        self._fitted = 0
        self._layers: list[nn.Module] = []
        if self._sharded:
            self._layers = list(decoder_layers(policy.model))
            for layer in self._layers:  # behind the hook that gathers the layer's weights
                layer.register_forward_pre_hook(self._enter)

    def run(
        self,
        layout: Layout,
        part: Part,
        scope: Scope,
        forward: Callable[[Part], Any],
        backward: Callable[[Any], Any] | None = None,
    ) -> Iterator[tuple[Part, Any]]:
        """Yields what `backward(forward(part))` returns, for the items or for each part of them
        that fits. Either of the two must leave nothing behind where it fails."""
        waiting = deque([part])
        while waiting:
            items, counted = waiting[0]
            shares = self.policy.shares_in(layout, items)
            size = workload(layout, items, Cost(), shares=shares).size
            recomputes = self.policy.always_recomputes or size >= self.recomputed_from
            failure = partial(_failure, layout, items, scope, recomputes)
            self._entered = 0
            with self.policy.recomputing(recomputes):
                made = self._tried(forward, waiting[0])
                if not made:
                    self._gather_the_rest()
                fits = bool(made) and (backward is None or self._has_room(size))
                own = _FITS if fits else failure()
                verdict, split_size = self._agreed(own, size)
                if verdict == _FITS and backward is not None:
                    made = self._tried(self._measured(backward, size), made.pop())
                    if not made:
                        if self._sharded:
                            raise self._error(size, on_all_ranks=False)
                        own = verdict = failure()
            if verdict == _FITS:
                self._fitted = max(self._fitted, size)
                yield waiting.popleft(), made.pop()
                continue
            made.clear()
            self._abandon()
            if self.policy.keep_logits:
                self.policy.keep_logits = 0
                self._tell(size, "without keeping logits, as all will be from now on")
                continue
            if verdict == _ENDS:
                raise self._error(size, on_all_ranks=True)
            if verdict == _RECOMPUTES:
                if own == _RECOMPUTES:
                    self.recomputed_from = min(size, self.recomputed_from)
                self._tell(size, "with activations dropped, as all of its size will be from now on")
                continue
            parts = [(half, counted) for half in halves(layout, items, scope)]
            if len(parts) == 1:  # nothing to split: takes part in the others' second half
                parts.append((items, False))
            waiting.popleft()
            waiting.extendleft(reversed(parts))
            # A small pass that fails where larger ones fitted has met others' peaks.
            self.budget = min(self.budget, max(split_size // 2, self._fitted // 2, 1))
            self._fitted //= 2
            self._tell(
                split_size, f"in two halves, and none has over {self.budget} tokens from now on"
            )

    def _tried(self, work: Callable[[Any], Any], argument: Any) -> list[Any]:
        """What `work` returns, as a list that is empty where there was no memory for it. By then
        nothing refers to what it had made."""
        try:
            return [work(argument)]
        except Exception as exc:
            if not self._on or not is_out_of_memory(exc):
                raise
        self._clean_up()
        return []

    def _agreed(self, verdict: int, size: int) -> tuple[int, int]:
        """The worst verdict of all ranks, and the smallest size that one of them has to split."""
        splits = -float(size) if verdict == _SPLITS else -math.inf
        worst, smallest = self.world.largest(float(verdict), splits)
        return int(worst), size if math.isinf(smallest) else int(-smallest)

    def _enter(self, *_: object) -> None:
        self._entered += 1

    def _gather_the_rest(self) -> None:
        """Takes part in what the other ranks still gather in their forward passes."""
        if self._sharded:
            for module in (self.policy, *self._layers[self._entered :]):
                module.unshard()  # type: ignore[operator] # nothing where it has been
                if module is not self.policy:
                    module.reshard()  # type: ignore[operator]

    def _abandon(self) -> None:
        """Forgets a forward pass that no backward pass will follow; so does FSDP2."""
        self._clean_up()
        if self._sharded:
            self.policy.reset_iter_state()  # type: ignore[operator]

    def _clean_up(self) -> None:
        if self.policy.graphs is not None:
            self.policy.graphs.forget()
        release_memory()

    def _has_room(self, size: int) -> bool:
        """Whether this rank can get what earlier backward passes took, by their tokens."""
        if not self._sharded or self.world.device.type != "cuda":
            return True
        try:
            wanted = int(self._bytes_per_token * size)
            torch.empty(wanted, dtype=torch.uint8, device=self.world.device)
        except torch.OutOfMemoryError:
            return False
        return True

    def _measured(self, backward: Callable[[Any], Any], size: int) -> Callable[[Any], Any]:
        """`backward`, after which it is known what it took, if it took more than any so far."""
        device = self.world.device
        if not self._sharded or device.type != "cuda":
            return backward

        def measured(made: Any) -> Any:
            held = torch.cuda.memory_allocated(device)
            before = torch.cuda.max_memory_allocated(device)
            result = backward(made)
            if (peak := torch.cuda.max_memory_allocated(device)) > before:
                self._bytes_per_token = max(self._bytes_per_token, (peak - held) / size)
            return result

        return measured

    def _tell(self, size: int, how: str) -> None:
        level = logging.INFO if self._told or not self.world.leads else logging.WARNING
        where, self._told = self.world.device, True
        _log.log(
            level, "out of memory on %s: a pass of %d tokens is computed again %s", where, size, how
        )

    def _error(self, size: int, *, on_all_ranks: bool) -> OutOfMemoryError:
        tried = (
            f"{size} tokens that cannot be split do not fit, not even with their activations "
            "dropped"
            if on_all_ranks
            else f"a backward pass of {size} tokens did not fit, and other ranks are in theirs"
        )
        error = OutOfMemoryError(
            f"out of memory on {self.world.device}: {tried}. Lower max_seq_len or "
            f"micro_token_budget={self.budget} (`ludic calibrate` finds the largest that fits), "
            'set optimizer_device="cpu", train an adapter, or give the engine fewer slots'
        )
        error.on_all_ranks = on_all_ranks
        return error


def halves(layout: Layout, members: Sequence[int], scope: Scope) -> list[tuple[int, ...]]:
    """The items of a micro-batch as two of about the same length, each with rows that begin alike;
    all of them as one where the loss must see them together."""
    rank, lengths = layout.order.ranks.__getitem__, layout.order.lengths
    own = set(members)
    units = [unit for unit in rows_together(layout, scope) if unit[0] in own]
    if len(units) < 2:
        return [tuple(members)]
    units.sort(key=lambda unit: min(map(rank, unit)))
    ends = np.cumsum([sum(lengths[i] for i in unit) for unit in units])
    cut = 1 + int(np.abs(ends[:-1] - ends[-1] / 2).argmin())
    return [tuple(sorted(i for unit in part for i in unit)) for part in (units[:cut], units[cut:])]
