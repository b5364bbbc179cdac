"""New module objects around a module's own parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


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
    seen: dict[int, nn.Module] = {}

    def own_config(config: Any) -> Any:
        if id(config) not in configs:
            configs[id(config)] = copy.deepcopy(config)
            change_config(configs[id(config)])
        return configs[id(config)]

    def clone(module: nn.Module) -> nn.Module:
        if id(module) in seen:
            return seen[id(module)]
        new = seen[id(module)] = make(module)
        # A module that was compiled in place calls what was compiled for the original.
        state = {**module.__dict__, "_compiled_call_impl": None}
        if hasattr(state.get("config"), "_attn_implementation"):
            state["config"] = own_config(state["config"])
        state["_modules"] = {
            name: clone(child) if child is not None else None
            for name, child in module._modules.items()
        }
        new.__dict__.update(state)
        return new

    return clone(model)
