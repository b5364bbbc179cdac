"""AdamW with masters and moments in the host's memory, which saves the device 12 bytes per trained
parameter."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludic.memory.update import STREAM_BYTES
from ludic.sharding.weights import dithered, laid_out_like, own_rows
from ludic.training.config import TrainerConfig
from ludic.training.update.optimizer import MOMENTS, MasterAdamW, is_narrow

_log = logging.getLogger("ludic.training")
_SLOTS = 16
"""Pieces that are on the device at one time: on their way in, stepped, and on their way out."""
_PIECE = STREAM_BYTES // (12 * _SLOTS) // 64 * 64
"""Numbers that are stepped at once."""
_ALIGNED = 16
"""A parameter begins at a multiple of so many numbers, where kernels read four at once."""


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], cfg: TrainerConfig
) -> MasterAdamW:
    """The optimizer with its state where `cfg.optimizer_device` says."""
    kind = MasterAdamW if cfg.optimizer_device is None else HostAdamW
    return kind(parameters, cfg)


class Lane:
    """Work that is done in the order in which it was given: by a stream of a GPU, or at once."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def do(self, work: Callable[[], object]) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Any:
        """The end of what was given so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Has what is given from now on begin behind a mark, which may be another lane's."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def use(self, memory: Tensor) -> None:
        """Keeps memory from being given to others before the work of this lane is done."""
        if self._stream is not None:
            memory.record_stream(self._stream)

    def finish(self) -> None:
        """Waits until all work is done."""
        if self._stream is not None:
            self._stream.synchronize()


class _Part(NamedTuple):
    """A run of a parameter's numbers: where it is in the parameter, and in its piece."""

    name: str
    numbers: slice
    place: slice


class HostAdamW(MasterAdamW):
    """`MasterAdamW` with masters and moments on the host. On a GPU its values are the same to the
    bit, since the same kernel steps them there.

    All masters are one array in pinned memory, and so are the first and the second moments. A step
    goes through the three in pieces. A piece is copied to a slot of a ring on the device, stepped
    there, and copied back; its weights go to the module at once. The two ways have streams of their
    own, so both directions of the bus are busy. A slot is filled again when its last piece is back
    on the host, and no step begins before all pieces of the last one are. The last pieces are still
    being copied back after `step` returns; reading `masters` or the state waits for them.

    Gradients are added up on the device in float32, as those of `MasterAdamW` are. On a CPU pieces
    are stepped where they are.
    """

    remedy = "train an adapter, or give the engine fewer slots"

    def _make_room(self) -> None:
        rows = {name: own_rows(p.detach()) for name, p in self.parameters.items()}
        first = next(iter(rows.values()))
        self._device, on_gpu = first.device, first.is_cuda
        self._staged = self._device.type != "cpu"
        self._way_in, self._way_out = (
            Lane(torch.cuda.Stream(first.device) if on_gpu else None)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        wide = any(r.dtype == torch.float64 for r in rows.values())
        dtype = torch.float64 if wide else torch.float32
        self._places, end = dict[str, slice](), 0
        for name, own in rows.items():
            self._places[name] = slice(end, end + own.numel())
            end += -(-own.numel() // _ALIGNED) * _ALIGNED
        self._pieces = list(_pieces(self._places, end))
        self._arrays = {k: _host_array(end, dtype, on_gpu) for k in ("master", *MOMENTS)}
        pinned = [a for a in self._arrays.values() if on_gpu and _pin(a, self._device)]
        self._unpin = weakref.finalize(self, _unpin, self._way_out, pinned, self._device)
        self._unpin.atexit = False  # the process gives all back

    def _on_host(self, kind: str, name: str) -> Tensor:
        """The place of a parameter's master, or of one of its moments."""
        rows, numbers = own_rows(self.parameters[name].detach()), self._places[name]
        return laid_out_like(self._arrays[kind][numbers].view(rows.shape), self.parameters[name])

    @torch.no_grad()
    def _master(self, name: str, cfg: TrainerConfig) -> Tensor:
        place = self._on_host("master", name)
        own_rows(place).copy_(own_rows(super()._master(name, cfg).detach()))
        return place

    def _moment(self, name: str, kind: str) -> Tensor:
        return self._on_host(kind, name)

    def _begin(self, cfg: TrainerConfig) -> None:
        self._cfg, self._fused = cfg, False
        self._states: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        self._ring = torch.empty(0)

    @property
    def masters(self) -> dict[str, Tensor]:
        """By parameter; waits until the last step's are back, as the moments are then, too."""
        self._way_out.finish()
        return self._masters

    @masters.setter
    def masters(self, masters: dict[str, Tensor]) -> None:
        self._masters = masters

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
    def step(self, learning_rate: float, scale: float = 1.0) -> None:
        held = self._gradients()
        if self._staged:
            self._with_what_is_free(self._make_ring)
        if held and scale != 1.0:
            torch._foreach_mul_(list(held.values()), scale)
        dtype = self._arrays["master"].dtype
        gradients = {name: own_rows(g).reshape(-1).to(dtype) for name, g in held.items()}
        counts = self._count_step(held)
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        compute = Lane(stream)
        self._way_in.wait(compute.mark())  # the ring's memory was others' before
        self._way_in.wait(self._way_out.mark())
        slots, left = len(self._ring), dict[int, Any]()
        pieces = [(n, [p for p in parts if p.name in held]) for n, parts in self._pieces]
        for number, (numbers, parts) in enumerate(piece for piece in pieces if piece[1]):
            state = here = [array[numbers] for array in self._arrays.values()]
            if self._staged:
                state = list(self._ring[number % slots, :, : len(here[0])])
                self._way_in.wait(left.get(number % slots))
                self._way_in.do(partial(_copy, state, here))
            compute.wait(self._way_in.mark())
            compute.do(partial(self._step_parts, parts, state, gradients, counts, learning_rate))
            if self._staged:
                self._way_out.wait(compute.mark())
                self._way_out.do(partial(_copy, here, state))
                left[number % slots] = self._way_out.mark()
        compute.finish()  # engines in other threads may sample now
        self._ring = torch.empty(0)
        self._written = self._versions()
        self.zero_grad()

    def _make_ring(self) -> None:
        """For this step alone: activations have the memory before and after."""
        array, count = self._arrays["master"], min(_SLOTS, len(self._pieces))
        rest = len(self._arrays), min(_PIECE, len(array))
        while True:
            try:
                self._ring = torch.empty((count, *rest), dtype=array.dtype, device=self._device)
                break
            except torch.OutOfMemoryError:  # fewer pieces at once are slower, and no failure
                if count == 1:
                    raise
                count //= 2
        for lane in (self._way_in, self._way_out):
            lane.use(self._ring)

    def _count_step(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The number of this step for each parameter, on the device."""
        numbers: dict[str, float] = {}
        for name in names:
            if not self._states[name]:
                self._states[name] = {"step": torch.zeros(())}
                self._states[name] |= {kind: self._moment(name, kind) for kind in MOMENTS}
            numbers[name] = self._states[name]["step"].item() + 1
        counts = {
            n: torch.full((), n, dtype=torch.float32, device=self._device)
            for n in set(numbers.values())
        }
        for name in numbers:  # when nothing can fail any more
            self._states[name]["step"] += 1
        return {name: counts[number] for name, number in numbers.items()}

    @torch.no_grad()
    def _step_parts(
        self,
        parts: Sequence[_Part],
        state: Sequence[Tensor],
        gradients: Mapping[str, Tensor],
        counts: Mapping[str, Tensor],
        learning_rate: float,
    ) -> None:
        for decays in (True, False):
            own = [p for p in parts if (self.parameters[p.name].ndim >= 2) == decays]
            if not own:
                continue
            masters, first, second = ([array[p.place] for p in own] for array in state)
            torch._fused_adamw_(
                masters,
                [gradients[p.name][p.numbers] for p in own],
                first,
                second,
                [],
                [counts[p.name] for p in own],
                lr=learning_rate,
                beta1=self._cfg.betas[0],
                beta2=self._cfg.betas[1],
                weight_decay=self._cfg.weight_decay if decays else 0.0,
                eps=self._cfg.eps,
                amsgrad=False,
                maximize=False,
            )
            rows = [own_rows(self.parameters[p.name].detach()).view(-1)[p.numbers] for p in own]
            torch._foreach_copy_(rows, masters)

    def zero_grad(self) -> None:
        self._sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def start_over(self) -> None:
        self.zero_grad()
        self._way_out.finish()
        for kind in MOMENTS:
            self._arrays[kind].zero_()
        self._states = {name: {} for name in self.parameters}

    def close(self) -> None:
        self._unpin()


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for target, tensor in zip(to, source, strict=True):
        target.copy_(tensor, non_blocking=True)


def _pieces(places: Mapping[str, slice], end: int) -> Iterable[tuple[slice, list[_Part]]]:
    """The numbers of each piece, and the runs of parameters that are in it."""
    for start in range(0, end, _PIECE):
        stop, parts = min(start + _PIECE, end), list[_Part]()
        for name, place in places.items():
            low, high = max(start, place.start), min(stop, place.stop)
            if low < high:
                numbers = slice(low - place.start, high - place.start)
                parts.append(_Part(name, numbers, slice(low - start, high - start)))
        yield slice(start, stop), parts


def _host_array(count: int, dtype: torch.dtype, whole_pages: bool) -> Tensor:
    """Zeros. On whole pages they can be pinned, and are no larger than asked for: torch's own
    pinned memory is rounded up to a power of two. Forked processes do not inherit them: a shared
    page would be copied on write for one of them, and the GPU would keep using the other."""
    if not whole_pages:
        return torch.zeros(count, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(AttributeError, OSError):  # not on every system
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=dtype, count=count).zero_()


def _pin(array: Tensor, device: torch.device) -> bool:
    """Pins an array as a whole: no copy may cross from one registration into the next."""
    size = array.numel() * array.element_size()
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(array.data_ptr(), size, 1))  # type: ignore[no-untyped-call]
    if code:
        with suppress(RuntimeError):  # the next kernel would be blamed for it
            torch.empty(1, device=device).fill_(1)
        _log.warning(
            "%.1f GB of the host's memory cannot be pinned (CUDA error %d): the optimizer's steps "
            "will be slower",
            size / 1e9,
            code,
        )
    return not code


def _unpin(way_out: Lane, arrays: Sequence[Tensor], device: torch.device) -> None:
    """Before the memory goes back; nothing may be on its way to it."""
    way_out.finish()
    for array in arrays:
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(array.data_ptr())  # type: ignore[no-untyped-call]
