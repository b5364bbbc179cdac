"""Forward and backward passes as CUDA graphs, for models so small that launching kernels is the
cost.

A graph works on buffers of fixed sizes. So a micro-batch is padded to a graph's sizes: with whole
sequences of padding that no other sequence sees, and with action tokens whose gradient is zero.
Values and gradients are those of the micro-batch alone.

A pass of over `_PER_LAYER` x layers / parameters tokens takes longer to compute than to launch, and
is launched. That is 22,000 tokens for SmolLM2-135M, whose forward and backward passes took 0.07 s
an update instead of 0.16 to 0.20 on an H200 (benchmarks/README.md); 4,900 for Qwen2.5-0.5B, 1,800
for 1.5B and 370 for 7B. Micro-batches are larger than that unless the batch is small, so models of
half a billion parameters and more rarely use graphs, and lose nothing.

All graphs share one memory pool and one set of gradients, so no other pass may run between a
forward pass and its backward pass; `_Replay` detects one that does. A graph reads the weights at
their addresses at capture: weights that moved make every graph stale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludic.plumbing.cuda_streams import capture
from ludic.training.update.packing import MicroBatch, SharedKeys

_log = logging.getLogger("ludic.training")

Compute = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""Log-probs and entropies of a micro-batch's action tokens."""

_PER_LAYER = 1e11
"""Parameters times tokens, for each layer, up to which a pass takes longer to launch than to
compute: on an H200, where a layer's launches take 5 ms."""
_BLOCK = 128
"""The longest sequence is rounded up to these: what attention kernels compute at once."""
_MOST_GRAPHS = 6
_SPARE = 2**30
_MOST_FAILURES = 3
_PAUSE = 200
"""Passes until a capture is tried again, times how often one has failed."""


class Sizes(NamedTuple):
    """The sizes of a micro-batch; `keys` is 0 where sequences attend to themselves alone."""

    tokens: int
    sequences: int
    actions: int
    longest: int
    keys: int
    most_keys: int

    @classmethod
    def of(cls, micro: MicroBatch) -> Sizes:
        keys = micro.keys
        return cls(
            len(micro.input_ids),
            len(micro.lengths),
            len(micro.target_ids),
            max(micro.lengths),
            0 if keys is None else len(keys.places),
            0 if keys is None else max(keys.lengths),
        )

    def padding(self, inner: Sizes) -> tuple[int, int, int] | None:
        """Sequences, tokens and keys of padding that make `inner` these sizes; None if none do.

        Every sequence of padding has a token at least and no fewer keys than tokens.
        """
        rows, tokens = self.sequences - inner.sequences, self.tokens - inner.tokens
        keys = self.keys - inner.keys
        if any(mine < other for mine, other in zip(self, inner, strict=True)):
            return None
        if bool(self.keys) != bool(inner.keys):
            return None
        if rows == 0:
            return (0, 0, 0) if tokens == keys == 0 else None
        fits = rows <= tokens <= rows * self.longest
        if self.keys:
            fits &= tokens <= keys <= rows * self.most_keys
        return (rows, tokens, keys) if fits else None

    def rounded_up(self) -> Sizes | None:
        """Sizes that this one and others like it fit; None if none were found."""
        longest, most_keys = (-(-n // _BLOCK) * _BLOCK for n in (self.longest, self.most_keys))
        rows, tokens, keys = 1, self.tokens, self.keys
        for _ in range(8):
            found = Sizes(
                _rounded(tokens),
                _rounded(self.sequences + rows),
                _rounded(self.actions),
                longest,
                _rounded(keys) if self.keys else 0,
                most_keys,
            )
            if found.padding(self) is not None:
                return found
            rows = max(rows, found.sequences - self.sequences)
            if self.keys:
                rows = max(rows, -(-(found.keys - self.keys) // most_keys))
            rows = max(rows, -(-(found.tokens - self.tokens) // longest))
            tokens = self.tokens + max(rows, found.sequences - self.sequences)
            keys = self.keys + found.tokens - self.tokens
        return None

    def is_close_fit(self, inner: Sizes) -> bool:
        """Whether padding `inner` to these sizes costs less than launching it, and no new graph."""
        return self.tokens <= 3 * inner.tokens and self.actions <= 3 * inner.actions + _BLOCK


def _rounded(n: int) -> int:
    """Up by a quarter at most, so that few sizes occur."""
    step = 1 << max(n.bit_length() - 3, 4)
    return -(-n // step) * step


def pad(micro: MicroBatch, sizes: Sizes) -> MicroBatch:
    """The micro-batch with padding behind it, in the sizes given. Its `loss` stays as it is."""
    inner = Sizes.of(micro)
    padding = sizes.padding(inner)
    if padding is None:
        raise ValueError(f"{inner} cannot be padded to {sizes}")
    rows, tokens, keys = padding
    actions = sizes.actions - inner.actions
    own = _shares(tokens, rows)
    lengths = (*micro.lengths, *own)
    seen = micro.keys
    if seen is not None:
        whole = _shares(keys, rows)
        seen = SharedKeys(
            _extended(seen.places, keys, inner.tokens),
            _bounds(seen.cu_seqlens, whole),
            (*seen.lengths, *whole),
        )
    return replace(
        micro,
        input_ids=_extended(micro.input_ids, tokens, 0),
        position_ids=_extended(micro.position_ids, tokens, 0),
        cu_seqlens=_bounds(micro.cu_seqlens, own),
        lengths=lengths,
        action_positions=_extended(micro.action_positions, actions, 0),
        target_ids=_extended(micro.target_ids, actions, 0),
        temperatures=_extended(micro.temperatures, actions, 1),
        keys=seen,
    )


def _shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` numbers as equal as can be, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def _extended(values: Tensor, count: int, value: float) -> Tensor:
    return torch.cat([values, values.new_full((count,), value)])


def _bounds(cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
    more = torch.tensor(lengths, dtype=cu_seqlens.dtype).cumsum(0, dtype=cu_seqlens.dtype)
    return torch.cat([cu_seqlens, cu_seqlens[-1:] + more.to(cu_seqlens.device, non_blocking=True)])


class PassGraphs:
    """`compute` and its backward pass, captured per size and replayed.

    `capture=False` does the same on the same buffers without graphs, for devices that have none.
    """

    def __init__(self, compute: Compute, model: nn.Module, layers: int, *, capture: bool) -> None:
        self.compute, self.model, self.capture = compute, model, capture
        count = sum(p.numel() for p in model.parameters())
        self.most_tokens = int(_PER_LAYER * layers / max(count, 1))
        self.passes: dict[Sizes, _Pass] = {}
        self.serial = 0
        self._off = False
        self._failures = self._pause = 0
        self.pool: Any = None
        self._addresses: tuple[int, ...] = ()
        self.trained: list[nn.Parameter] = []
        self.gradients: list[Tensor] = []
        self._anchor: Tensor | None = None

    def __call__(self, micro: MicroBatch) -> tuple[Tensor, Tensor] | None:
        """What `compute` returns; None where the caller is to compute it. Gradients go to the
        parameters' `grad`."""
        sizes = Sizes.of(micro)
        if self._off or micro.kept is not None or sizes.tokens > self.most_tokens:
            return None
        self._drop_if_changed()
        if self._off or not self.trained or _has_hooks(self.model):
            return None
        found = self._find(sizes)
        if found is None:
            return None
        assert self._anchor is not None
        logprobs, entropies = _Replay.apply(self._anchor, self, found, micro)  # type: ignore[no-untyped-call]
        return logprobs[: sizes.actions], entropies[: sizes.actions]

    def _find(self, sizes: Sizes) -> _Pass | None:
        for own, known in self.passes.items():
            if own.is_close_fit(sizes) and own.padding(sizes) is not None:
                self.passes[own] = self.passes.pop(own)  # the last one used is the last to go
                return known
        rounded = sizes.rounded_up()
        if rounded is None:
            return None
        if len(self.passes) >= _MOST_GRAPHS:
            del self.passes[next(iter(self.passes))]
        return self.passes.setdefault(rounded, _Pass(self, rounded))

    def may_capture(self, took: int) -> bool:
        """Whether a pass that took so much memory when it was launched may be captured now."""
        if self._pause > 0:
            self._pause -= 1
            return False
        if self.free_memory() < 1.25 * took + _SPARE:
            self.failed(f"that would take {took / 1e6:.0f} MB")
            return False
        return True

    def captured(self) -> None:
        self._failures = 0

    def forget(self) -> None:
        """Gives back the memory of all graphs, and of what is held between two passes."""
        self.passes.clear()
        self._addresses, self.gradients, self.pool = (), [], None

    def failed(self, why: object) -> None:
        """Leaves captures alone for a while, since what was in the way may go; the third time in a
        row for good. Graphs that there are stay."""
        self._failures += 1
        if self._failures < _MOST_FAILURES:
            self._pause = _PAUSE * self._failures
            _log.info("a pass was not captured as a CUDA graph, and is launched: %s", why)
            return
        self._off = True
        self.passes.clear()
        _log.warning("passes cannot be captured as CUDA graphs, and are launched: %s", why)

    def allocated(self) -> int:
        """The bytes in use; of passes that are never captured, nobody wants to know."""
        return torch.cuda.memory_allocated(self._device()) if self.capture else 0

    def peak(self) -> int:
        """The most bytes in use since somebody reset the count, which no one does in a pass."""
        return torch.cuda.max_memory_allocated(self._device()) if self.capture else 0

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self._device())[0]

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _drop_if_changed(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        addresses = tuple(p.data_ptr() for p in self.model.parameters())
        if addresses == self._addresses and [*map(id, trained)] == [*map(id, self.trained)]:
            return
        self.passes.clear()
        self._addresses, self.trained = addresses, trained
        self.gradients = [torch.zeros_like(p) for p in trained]
        device = self._device()
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        # A pool without graphs is gone; its handle must not be used again.
        self.pool = torch.cuda.graph_pool_handle() if self.capture else None

    def add_gradients(self, used: Sequence[int]) -> None:
        """Adds those of the last backward pass to the parameters', as autograd does: a parameter
        that had no part in it gets none."""
        pairs = [(self.trained[i], self.gradients[i]) for i in used]
        fresh = [(p, g) for p, g in pairs if p.grad is None]
        more = [(p.grad, g) for p, g in pairs if p.grad is not None]
        copies = [torch.empty_like(g) for _, g in fresh]  # first: nothing else can fail
        if more:
            torch._foreach_add_([held for held, _ in more], [g for _, g in more])
        if fresh:
            torch._foreach_copy_(copies, [g for _, g in fresh])
            for (parameter, _), copy in zip(fresh, copies, strict=True):
                parameter.grad = copy


def _has_hooks(model: nn.Module) -> bool:
    """Whether somebody wants to be called during a pass: a replayed one calls nobody."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in model.modules()
    ) or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


class _Pass:
    """One size: its buffers and, from its second use on, its two graphs."""

    def __init__(self, owner: PassGraphs, sizes: Sizes) -> None:
        self.owner, self.sizes = owner, sizes
        self.micro: MicroBatch | None = None
        self.results: tuple[Tensor, Tensor] | None = None
        self.grads: tuple[Tensor, Tensor] | None = None
        self.used: list[int] = []
        """Which of the trained parameters the pass has gradients for."""
        self.took = 0
        """The memory that it took when it was launched, beside what was in use before."""
        self._before = 0
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        padded = pad(micro, self.sizes)
        again = self.grads is not None
        ready = self.owner.capture and again and self.graphs is None
        if ready and self.owner.may_capture(self.took):
            # It has run once, so by now every library has set itself up.
            self.micro = self._fixed(padded)
            self._capture()
        if self.graphs is not None:
            _overwrite(self.micro, padded)
            self.graphs[0].replay()
        else:
            self.micro = padded
            self._before = self.owner.allocated()
            self._forward()
        assert self.results is not None
        logprobs, entropies = self.results
        return logprobs.detach().clone(), entropies.detach().clone()

    def backward(self, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> None:
        assert self.results is not None
        if self.grads is None:
            first, second = (torch.zeros_like(t) for t in self.results)
            self.grads = first, second
        for fixed, new in zip(self.grads, (grad_logprobs, grad_entropies), strict=True):
            fixed.zero_() if new is None else fixed.copy_(new)
        if self.graphs is not None:
            self.graphs[1].replay()
        else:
            self._backward()
            self.took = self.owner.peak() - self._before

    def _fixed(self, padded: MicroBatch) -> MicroBatch:
        """Buffers for every micro-batch of the size: the kernels are told the longest there may
        be, and nothing else that changes is known to the host."""
        keys = padded.keys
        if keys is not None:
            keys = replace(keys, lengths=(self.sizes.most_keys,))
        return replace(padded, lengths=(self.sizes.longest,), keys=keys)

    def _forward(self) -> None:
        assert self.micro is not None
        with torch.enable_grad():
            self.results = self.owner.compute(self.micro)

    def _backward(self) -> None:
        owner = self.owner
        assert self.results is not None
        results, self.results = self.results, (self.results[0].detach(), self.results[1].detach())
        found = torch.autograd.grad(results, owner.trained, self.grads, allow_unused=True)
        self.used = [i for i, g in enumerate(found) if g is not None]
        torch._foreach_copy_(
            [owner.gradients[i] for i in self.used], [g for g in found if g is not None]
        )

    def _capture(self) -> None:
        """Captures both passes; what they compute is known once they are replayed.

        No graph of autograd may be alive that leads to the parameters from another stream: its
        nodes would be met again here, and would wait for that stream. So `_backward` keeps none.
        """
        self.results = None
        try:
            self.graphs = self._captured()
        except RuntimeError as exc:
            self.owner.failed(exc)
        else:
            self.owner.captured()

    def _captured(self) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Not of the whole device: the engine may be capturing in another thread.
        torch.cuda.current_stream().synchronize()
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                for graph, work in zip(graphs, (self._forward, self._backward), strict=True):
                    with capture(graph, self.owner.pool):
                        work()
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        return graphs


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, graphs: PassGraphs, found: _Pass, micro: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        graphs.serial += 1
        ctx.graphs, ctx.found, ctx.serial = graphs, found, graphs.serial
        ctx.set_materialize_grads(False)
        return found.forward(micro)

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> Any:
        graphs: PassGraphs = ctx.graphs
        if ctx.serial != graphs.serial:
            raise RuntimeError(
                "another forward pass ran before this one's backward pass, and took its memory: "
                "call backward first, or make the trainer with graphs=False"
            )
        ctx.found.backward(grad_logprobs, grad_entropies)
        graphs.add_gradients(ctx.found.used)
        return (None,) * 4


def _overwrite(fixed: Any, new: Any) -> None:
    """Copies what a padded micro-batch's passes read into the buffers of another."""
    for field in fields(fixed):
        old, value = getattr(fixed, field.name), getattr(new, field.name)
        if isinstance(old, Tensor):
            old.copy_(value, non_blocking=True)
        elif isinstance(old, SharedKeys):
            _overwrite(old, value)
