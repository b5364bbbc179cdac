"""Records which tensor a model's own loader copies to which place, so that later updates can skip
it.

A loader looks up every tensor's place in Python, which takes longer than all the copies: 27 of the
35 ms for which a server with 290 tensors stood still. So its copies are recorded the first time,
and from then on made all together. A loader that does anything but copy every element of every
parameter once, or fill it with a constant, is not recorded. Imported by vLLM alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Named = Sequence[tuple[str, Tensor]]
T = TypeVar("T")
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
_MAY_BE_TIED = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Copy:
    """Into `target`, which is a part of a parameter, from that part of the staged tensor `name`."""

    target: Tensor
    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Copies:
    """The copies of one model's loader, for tensors of the same names, types and layouts."""

    def __init__(self) -> None:
        self._copies: list[_Copy] | None = None
        self._known: Any = None

    def repeat(self, model: nn.Module, staged: Named) -> bool:
        """Makes the recorded copies; False: these are other tensors, or none were recorded."""
        if self._copies is None or self._known != _layout(model, staged):
            return False
        tensors = dict(staged)
        sources = [
            tensors[c.name].as_strided(
                c.shape, c.stride, tensors[c.name].storage_offset() + c.offset
            )
            for c in self._copies
        ]
        with torch.no_grad():
            torch._foreach_copy_([copy.target for copy in self._copies], sources)
        return True

    def record(self, model: nn.Module, staged: Named, load: Callable[[], T]) -> T:
        """Runs `load`, and remembers what it copied if nothing else happened."""
        self._copies = None
        with _Recorder() as recorder:
            loaded = load()
        self._copies = _sorted_out(recorder, model, staged)
        self._known = _layout(model, staged)
        return loaded


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied: list[tuple[Tensor, Tensor]] = []
        self.filled: list[Tensor] = []
        self.only_copies = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.copied.append((args[0].detach(), args[1].detach()))
        elif func in _FILLS:
            self.filled.append(args[0].detach())
        elif func._schema.is_mutable or isinstance(result, (bool, int, float, complex)):
            # Another write; or a value that Python was told, and may write somewhere.
            self.only_copies = False
        return result


def _sorted_out(recorder: _Recorder, model: nn.Module, staged: Named) -> list[_Copy] | None:
    """The copies from staged tensors; None: they are not all that makes up the parameters."""
    tensors = sorted((pair for pair in staged if pair[1].numel()), key=lambda p: p[1].data_ptr())
    begins = [tensor.data_ptr() for _, tensor in tensors]
    copies = []
    for target, source in recorder.copied:
        at = bisect_right(begins, source.data_ptr()) - 1
        if at < 0 or source.dtype != tensors[at][1].dtype or not target.is_contiguous():
            return None
        name, tensor = tensors[at]
        offset = (source.data_ptr() - begins[at]) // tensor.element_size()
        last = sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
        if not tensor.is_contiguous() or offset + last >= tensor.numel():
            return None
        shape = tuple(source.expand_as(target).shape)
        if shape != tuple(source.shape):
            return None
        copies.append(_Copy(target, name, offset, shape, source.stride()))
    written = [*(copy.target for copy in copies), *recorder.filled]
    if not recorder.only_copies or not all(t.is_contiguous() for t in written):
        return None
    if _overlap([copy.target for copy in copies], recorder.filled):
        return None
    if not _is_sharded() and not all(_is_covered(*pair, copies) for pair in tensors):
        return None
    return copies if _spans(written) == _spans(model.parameters()) else None


def _is_sharded() -> bool:
    """Whether other workers take parts of the tensors."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _is_covered(name: str, tensor: Tensor, copies: Sequence[_Copy]) -> bool:
    """Whether the copies read every element of a staged tensor; a tied head need not be read."""
    parts = {(c.offset, c.shape, c.stride) for c in copies if c.name == name}
    if not parts:
        return name.endswith(_MAY_BE_TIED)
    return sum(torch.Size(shape).numel() for _, shape, _ in parts) >= tensor.numel()


def _overlap(copied: Sequence[Tensor], filled: Sequence[Tensor]) -> bool:
    """Whether what one copy writes is written again: the order would matter. Fills alone may."""
    pieces = sorted([*map(_bytes, copied), *_spans(filled)])
    pieces = [piece for piece in pieces if piece[0] < piece[1]]
    return any(later[0] < earlier[1] for earlier, later in pairwise(pieces))


def _bytes(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def _spans(tensors: Any) -> list[tuple[int, int]]:
    """The bytes of memory that the tensors take up, in as few pieces as there are."""
    spans: list[tuple[int, int]] = []
    pieces = {_bytes(t) for t in tensors}
    for begin, end in sorted(pieces):
        if begin == end:
            continue
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    return spans


def _layout(model: nn.Module, staged: Named) -> Any:
    """What must be the same for the same copies to be right."""
    places = [(name, p.data_ptr(), p.dtype) for name, p in model.named_parameters()]
    return places, [(name, t.dtype, tuple(t.shape), t.stride()) for name, t in staged]
