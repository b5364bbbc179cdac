"""What the tests add to a real vLLM worker, so that it fails when it is told to.

Imported by vLLM's own process, as `failing_worker`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ludic.distributed.in_vllm.served_model import why_rebuild
from ludic.distributed.in_vllm.worker import WorkerExtension


class FailingExtension(WorkerExtension):
    """Methods that `/collective_rpc` may call on a worker."""

    def fail_next_load(self, after: int, killed: bool = False) -> None:
        """The next update fails when so many of its tensors have been read; `killed`: because this
        process is."""
        model: Any = self.weight_transfer_engine.model  # type: ignore[attr-defined]
        load = model.load_weights

        def failing(weights: Iterable[Any]) -> Any:
            del model.load_weights
            return load(_cut(weights, after, killed))

        model.load_weights = failing

    def fail_next_reload(self) -> None:
        """The next update can be read, but vLLM cannot put its layers together again."""
        from vllm.model_executor.model_loader import reload

        finalize = reload.finalize_layerwise_reload

        def failing(*_: Any) -> None:
            reload.finalize_layerwise_reload = finalize
            raise RuntimeError("made to fail in the end")

        reload.finalize_layerwise_reload = failing

    def judge(self) -> dict[str, Any]:
        """What is found of the served model, were it on a GPU. Its layers are looked at as they
        are when they have been created, since the CPU build packs them afterwards."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        engine: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        initialize_layerwise_reload(engine.model)
        try:
            why = why_rebuild(engine.model, engine.model_config, SimpleNamespace(type=_Anything()))  # type: ignore[arg-type]
        finally:
            finalize_layerwise_reload(engine.model, engine.model_config)
        return {
            "on a GPU": why,
            "here": why_rebuild(engine.model, engine.model_config, torch.device("cpu")),
        }


class _Anything(str):
    """Equal to the type of every device."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False


def _cut(weights: Iterable[Any], after: int, killed: bool) -> Iterator[Any]:
    for index, pair in enumerate(weights):
        if index == after:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("made to fail half-way")
        yield pair
