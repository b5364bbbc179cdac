"""New module objects around a module's own parameters: unchanged, rounded, or widened.

The rounded copy is sampled from while the module is trained in float32. The wide copy shows what
rounding does to the module's logits, without a second copy of its weights: a decoder layer gets
wider parameters when it is called and drops them afterwards, so there is never more than one wide
layer. Modules outside a list of layers (embeddings, the last norm, the head) are widened one by
one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def same_kind(module: nn.Module) -> nn.Module:
    """An empty object of the module's class."""
    kind = type(module)
    return kind.__new__(kind)


def shared_copy(
    model: nn.Module,
    change_config: Callable[[Any], None],
    make: Callable[[nn.Module], nn.Module] = same_kind,
) -> Any:
    """The module with other objects and configurations, but the same parameter and buffer tables:
    what is written there, in place or by assignment, is seen by both.

    `make` returns the empty object that takes a module's place, with all that the module has;
    `change_config` is given a copy of each configuration.
    """
    configs: dict[int, Any] = {}
    clones: dict[int, nn.Module] = {}

    def own_config(config: Any) -> Any:
        if id(config) not in configs:
            configs[id(config)] = copy.deepcopy(config)
            change_config(configs[id(config)])
        return configs[id(config)]

    def clone(module: nn.Module) -> nn.Module:
        if id(module) in clones:
            return clones[id(module)]
        new = clones[id(module)] = make(module)
        # A module that was compiled in place calls what was compiled for the original.
        state = {**module.__dict__, "_compiled_call_impl": None}
        if "ludic_pass" in state:
            del state["forward"]  # the trainer's way through the original
        if hasattr(state.get("config"), "_attn_implementation"):
            state["config"] = own_config(state["config"])
        state["_modules"] = {
            name: clone(child) if child is not None else None
            for name, child in module._modules.items()
        }
        new.__dict__.update(state)
        return new

    return clone(model)


class Shadow:
    """New module objects around bfloat16 copies of a module's weights.

    Weights that are tied stay tied. Buffers are shared: what is kept in them (rotary frequencies)
    is not trained and wants its own type. The copies keep their addresses for good.

    `model` is read by the engine's thread. `refresh` is called by whoever holds the engine's
    pause, when that thread stands still.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: nn.Module = shared_copy(model, lambda config: None)
        self._pairs: list[tuple[dict[str, Any], str, Tensor]] = []
        copies: dict[int, nn.Parameter] = {}
        for live, own in zip(model.modules(), self.model.modules(), strict=True):
            table = own.__dict__["_parameters"] = dict(live._parameters)
            for name, parameter in live._parameters.items():
                if parameter is None or not parameter.is_floating_point():
                    continue
                if id(parameter) not in copies:
                    copy = parameter.detach().to(torch.bfloat16, copy=True)
                    copies[id(parameter)] = nn.Parameter(copy, requires_grad=False)
                    self._pairs.append((live._parameters, name, copy))
                table[name] = copies[id(parameter)]
        self._seen = self._state()

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the module's weights, as they are now, into the copies."""
        live = [table[name].detach() for table, name, _ in self._pairs]
        torch._foreach_copy_([copy for _, _, copy in self._pairs], live)
        self._seen = self._state()

    @property
    def is_current(self) -> bool:
        """Whether no weight was written or replaced since the last refresh, as far as torch counts:
        it does not count what is written through `.data`."""
        return self._seen == self._state()

    def _state(self) -> list[tuple[int, int]]:
        live = (table[name] for table, name, _ in self._pairs)
        return [(parameter.data_ptr(), parameter._version) for parameter in live]


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
        tables: list[dict[str, Any]] = [t for p in parts for t in (p._parameters, p._buffers)]
        for tensors in tables:
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
