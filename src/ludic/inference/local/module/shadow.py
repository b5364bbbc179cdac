"""A bfloat16 copy of a module to sample from, while the module is trained in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ludic.inference.local.module.shared_copy import shared_copy


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
