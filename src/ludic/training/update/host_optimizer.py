"""AdamW whose masters and moments are in the host's memory: 12 bytes for each trained parameter
that the device does not have to hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ludic.sharding.weights import dithered, laid_out_like, own_rows
from ludic.training.config import TrainerConfig
from ludic.training.update.optimizer import MOMENTS, MasterAdamW, is_narrow

_PIECE = 1 << 23
"""Numbers that are stepped at once: few enough that the host's cache holds a part of them. On an
H200's host a quarter of that was no quicker."""
_AHEAD = 2
"""Pieces whose gradients are on their way while one is stepped."""


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], cfg: TrainerConfig
) -> MasterAdamW:
    """The optimizer with its state where `cfg.optimizer_device` says."""
    kind = MasterAdamW if cfg.optimizer_device is None else HostAdamW
    return kind(parameters, cfg)


class _Piece(NamedTuple):
    """A run of a parameter's numbers, their gradient on the host, when it will be there, and what
    it is still to be multiplied with."""

    name: str
    numbers: slice
    gradient: Tensor
    arrival: torch.cuda.Event | None
    scale: float


class HostAdamW(MasterAdamW):
    """`MasterAdamW` with masters and moments on the host, value by value the same but for rounding.

    Where a step has one backward pass, each gradient leaves for the host as soon as it is
    complete, and its norm stays; where it has several, or the model is sharded, gradients are added
    up on the device and leave during the step. A step goes through the parameters in pieces: while
    one is stepped, by all cores, the gradients of the next arrive and the weights of the last
    return. Copies have a stream of their own and pinned memory: one slot for each parameter, in
    its type, where its gradient arrives and its new weights depart.

    Passes are not replayed as CUDA graphs then, since no graph calls the hooks of its parameters.
    """

    remedy = "train an adapter, or give the engine fewer slots"

    @torch.no_grad()
    def _master(self, name: str, cfg: TrainerConfig) -> Tensor:
        rows = own_rows(super()._master(name, cfg).detach())
        return laid_out_like(rows.to("cpu", copy=True).contiguous(), self.parameters[name])

    def _begin(self, cfg: TrainerConfig) -> None:
        self._cfg, self._fused = cfg, False
        self._states: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        self._sums: dict[str, Tensor] = {}
        self._arrivals: dict[str, torch.cuda.Event | None] = {}
        self._norms: dict[str, Tensor] = {}
        first = own_rows(next(iter(self.parameters.values())))
        self._stream = (
            torch.cuda.Stream(first.device) if first.is_cuda else None  # type: ignore[no-untyped-call]
        )
        self._slots = self._make_slots()
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._leave, name))  # type: ignore[no-untyped-call]
            for name, parameter in self.parameters.items()
            if own_rows(parameter) is parameter
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=self._stream is not None)

    def _make_slots(self) -> dict[str, Tensor]:
        """Of one allocation: torch rounds each up to a power of two."""
        rows = {name: own_rows(p) for name, p in self.parameters.items()}
        sizes = {name: -(-r.numel() * r.element_size() // 64) * 64 for name, r in rows.items()}
        memory = self._pinned(sum(sizes.values()), torch.uint8)
        parts = dict(zip(sizes, torch.split(memory, list(sizes.values())), strict=True))
        return {name: parts[name].view(r.dtype)[: r.numel()] for name, r in rows.items()}

    def _buffer(self, number: int, gradient: Tensor) -> Tensor:
        key = number, gradient.dtype
        if key not in self._buffers:
            self._buffers[key] = self._pinned(_PIECE, gradient.dtype)
        return self._buffers[key][: len(gradient)]

    def _copying(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _state(self, name: str) -> dict[str, Tensor]:
        return self._states[name]

    @torch.no_grad()
    def take_weights(self) -> None:
        for name, parameter in self.parameters.items():
            rows, master = own_rows(parameter).cpu(), own_rows(self.masters[name])
            if not torch.equal(master.to(rows.dtype), rows):
                narrow = is_narrow(parameter)
                new = own_rows(dithered(parameter, self._key(name))) if narrow else rows
                master.copy_(new)

    @torch.no_grad()
    def _leave(self, name: str, parameter: Tensor) -> None:
        """Sends off a gradient that is complete. Called by autograd, in the thread and on the
        stream of its backward pass."""
        gradient = parameter.grad
        if not self.sends_gradients or gradient is None:
            return
        wide = torch.promote_types(gradient.dtype, torch.float32)
        self._norms[name] = torch.linalg.vector_norm(gradient, dtype=wide)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
            gradient.record_stream(self._stream)
        with self._copying():
            self._slots[name].copy_(gradient.reshape(-1), non_blocking=True)
        self._arrivals[name] = None if self._stream is None else self._stream.record_event()
        parameter.grad = None

    @torch.no_grad()
    def _move_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is None or not is_narrow(parameter):
                continue
            if name in self._sums:
                self._sums[name].add_(parameter.grad)
            else:
                self._sums[name] = parameter.grad.float()
            parameter.grad = None

    def take_back(self, before: dict[str, tuple[Tensor, int]]) -> list[nn.Parameter]:
        self._arrivals.clear()
        self._norms.clear()
        return super().take_back(before)

    def _on_device(self) -> dict[str, Tensor]:
        """The gradients that have not left."""
        own = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        return own | self._sums

    def gradients(self) -> list[Tensor]:
        return [
            self._slots[name] if name in self._arrivals else held[name]
            for held in [self._on_device()]
            for name in self.parameters
            if name in self._arrivals or name in held
        ]

    @torch.no_grad()
    def gradient_norm(self) -> Float[Tensor, ""]:
        if not self._norms:
            return super().gradient_norm()
        norms = [self._norms[name] for name in self.parameters if name in self._norms]
        return torch.linalg.vector_norm(torch.stack(norms))  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, learning_rate: float, scale: float = 1.0) -> None:
        self._with_what_is_free(self._make_moments)
        coming: deque[_Piece] = deque()
        for piece in self._pieces(scale):
            coming.append(piece)
            if len(coming) > _AHEAD:
                self._step_piece(coming.popleft(), learning_rate)
        for piece in coming:
            self._step_piece(piece, learning_rate)
        if self._stream is not None:
            self._stream.synchronize()  # engines in other threads may sample now
        self.zero_grad()

    def _make_moments(self) -> None:
        held = self._on_device()
        for name, master in self.masters.items():
            if (name in self._arrivals or name in held) and not self._states[name]:
                state = {"step": torch.zeros(()), **{k: torch.zeros_like(master) for k in MOMENTS}}
                self._states[name] = state

    def _pieces(self, scale: float) -> Iterator[_Piece]:
        """Those that have left, in the order in which they did, and the others, which leave now,
        scaled on the device, where that costs nothing."""
        on_device = self._on_device()
        if on_device and scale != 1.0:
            torch._foreach_mul_(list(on_device.values()), scale)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for name, arrival in self._arrivals.items():
            for numbers in _runs(self._slots[name]):
                yield _Piece(name, numbers, self._slots[name][numbers], arrival, scale)
        number = 0
        for name, held in on_device.items():
            gradient = own_rows(held).reshape(-1)
            for numbers in _runs(gradient):
                # The one that had this buffer before has been stepped by now.
                buffer = self._buffer(number % (_AHEAD + 1), gradient[numbers])
                with self._copying():
                    buffer.copy_(gradient[numbers], non_blocking=True)
                arrival = None if self._stream is None else self._stream.record_event()
                yield _Piece(name, numbers, buffer, arrival, 1.0)
                number += 1

    def _step_piece(self, piece: _Piece, learning_rate: float) -> None:
        name, numbers, gradient, arrival, scale = piece
        if arrival is not None:
            arrival.synchronize()
        state, parameter = self._states[name], self.parameters[name]
        master, first, second = (
            own_rows(tensor).view(-1)[numbers]
            for tensor in (self.masters[name], *(state[k] for k in MOMENTS))
        )
        if gradient.dtype != master.dtype:
            gradient = self._buffer(_AHEAD + 1, master).copy_(gradient)
        if numbers.start == 0:
            state["step"] += 1
        cfg = self._cfg
        torch._fused_adamw_(
            [master],
            [gradient],
            [first],
            [second],
            [],
            [state["step"]],
            lr=learning_rate,
            beta1=cfg.betas[0],
            beta2=cfg.betas[1],
            weight_decay=cfg.weight_decay if parameter.ndim >= 2 else 0.0,
            eps=cfg.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if scale == 1.0 else torch.tensor(1 / scale),
        )
        slot = self._slots[name][numbers].copy_(master)
        with self._copying():
            own_rows(parameter).detach().view(-1)[numbers].copy_(slot, non_blocking=True)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        for held in (self._sums, self._arrivals, self._norms):
            held.clear()

    def start_over(self) -> None:
        self.zero_grad()
        self._states = {name: {} for name in self.parameters}


def _runs(flat: Tensor) -> Iterator[slice]:
    for start in range(0, len(flat), _PIECE):
        yield slice(start, min(start + _PIECE, len(flat)))
