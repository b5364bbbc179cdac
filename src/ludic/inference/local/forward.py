"""One call of the view: a flat row of tokens in, logits out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ludic.inference.local.attention import Layout, layout_in_use


class Forward:
    """Calls a `module_view`. `direct` goes past the outermost module, straight to its trunk and its
    head; it is set only where that was seen to give the same bits."""

    def __init__(self, view: Any, device: torch.device, direct: bool = False) -> None:
        self.view, self.device, self.direct = view, device, direct
        # A mask of four dimensions is passed through untouched; the layouts make their own.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=device)
        self._trunk, self._head = view.base_model, view.get_output_embeddings()

    def __call__(
        self, ids: Tensor, positions: Tensor, layout: Layout, keep: Tensor | None = None
    ) -> Tensor:
        """Logits [rows, vocab] for ids and positions [1, rows]; `keep` picks rows."""
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": self._no_mask,
            "use_cache": False,
        }
        with layout_in_use(layout):
            if self.direct:
                hidden = self._trunk(**inputs)[0]
                logits = self._head(hidden if keep is None else hidden[:, keep])
            else:
                logits = self.view(**inputs, logits_to_keep=0 if keep is None else keep).logits
        result: Tensor = logits[0]
        return result
