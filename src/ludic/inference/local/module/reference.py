"""A module's own forward pass in a wider type, without a second copy of its weights.

The module's objects are copied and its parameters are shared, as in a module view. A decoder layer
of the copy gets wider parameters when it is called and drops them when it is done, so there is
never more than one layer of them. What is not in a list of layers (embeddings, the last norm, the
head) is widened module by module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ludic.inference.local.module.shared_copy import shared_copy

WIDER = {torch.float32: torch.float64}
"""The type that shows what rounding does to a type; float32 for all the others."""


def reference_logits(model: nn.Module, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits [tokens, vocab] of `ids` [1, tokens] in `dtype`, wider than the module's own.

    A family that reads another module's parameters from outside, rather than by calling that
    module, meets a parameter that is not widened at that moment. Such a family is run as a whole
    copy instead: right as well, but as large as the model, for as long as this takes.
    """
    try:
        logits = _run(widened_by_layer(model, dtype), ids)
        if logits.dtype == dtype:
            return logits
    except Exception:  # whatever it stumbles over, the whole copy does not depend on it
        pass
    return _run(copy.deepcopy(model).to(dtype), ids)


def _run(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def widened_by_layer(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with new objects around its parameters, which are wider while they are in use."""
    face: nn.Module = shared_copy(model, _for_any_type)
    for module in face.modules():
        # Tables of its own, so that the module itself sees no hook and nothing wide.
        for name, value in list(module.__dict__.items()):
            if name in ("_parameters", "_buffers") or "_hooks" in name:
                module.__dict__[name] = copy.copy(value)
    for parts in _units(face):
        _widen_while_called(parts, dtype)
    return face


def _for_any_type(config: Any) -> None:
    """Chooses kernels that exist for every type."""
    if str(config._attn_implementation).startswith("flash"):
        config._attn_implementation = "sdpa"
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"


def _units(module: nn.Module) -> Iterator[list[nn.Module]]:
    """What is widened together: the modules of one layer, or one module outside of the layers."""
    if isinstance(module, nn.ModuleList):
        yield from (list(layer.modules()) for layer in module)
        return
    if module._parameters or module._buffers:
        yield [module]
    for child in module.children():
        yield from _units(child)


def _widen_while_called(parts: list[nn.Module], dtype: torch.dtype) -> None:
    narrow: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def widen(*_: Any) -> None:
        every: list[dict[str, Any]] = [t for p in parts for t in (p._parameters, p._buffers)]
        for tensors in every:
            narrow.append((tensors, dict(tensors)))
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_floating_point():
                    wide = tensor.detach().to(dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[name] = nn.Parameter(wide, False) if is_parameter else wide

    def narrow_again(*_: Any) -> None:
        while narrow:
            tensors, before = narrow.pop()
            tensors.update(before)

    parts[0].register_forward_pre_hook(widen)
    parts[0].register_forward_hook(narrow_again, always_call=True)
