"""What vLLM's workers report about themselves, and about the weights and adapters that they hold.

vLLM's own routes answer "success", which does not show what arrived. `--worker-extension-cls` adds
this class to its workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ludic.distributed.vllm.checksums import receipt
from ludic.distributed.vllm.placement import Place
from ludic.errors import LudicError
from ludic.inference.vllm.flags import BACKEND

_log = logging.getLogger("vllm.ludic")
_NO_ENGINE = {"error": f"the server was started without the weight transfer {BACKEND!r}"}


class WorkerExtension:
    """Methods that `/collective_rpc` may call on a worker."""

    def ludic_fetch(self, source: dict[str, Any]) -> dict[str, Any]:
        """Whether the file of an update over HTTP is here; the first call has it fetched."""
        engine: Any = getattr(self, "weight_transfer_engine", None)
        if not hasattr(engine, "fetched"):
            return _NO_ENGINE
        try:
            path = engine.fetched.begin(source)
            return {"fetched": path.done() and path.result().exists()}
        except (LudicError, OSError, ValueError) as exc:
            return {"error": str(exc)}

    def ludic_stage(self, update: dict[str, Any] | None) -> dict[str, Any]:
        """Takes the tensors of an update in, beside those that are served, and returns their
        receipt. What was staged before is dropped; None: that alone."""
        worker: Any = self
        engine: Any = getattr(worker, "weight_transfer_engine", None)
        if not hasattr(engine, "receipt"):
            return _NO_ENGINE
        try:
            engine.start_weight_update()
            with suppress(RuntimeError):  # where none was left open
                worker.finish_weight_update()
            if update is None:
                engine.fetched.drop()
                return {}
            worker.start_weight_update()
            worker.update_weights(update)
            return self.ludic_receipt()
        except Exception as exc:
            _log.exception("the worker did not take an update")
            parallel = getattr(worker, "parallel_config", None)
            if getattr(parallel, "data_parallel_index", 0):
                raise  # vLLM passes on answers of the first engine alone, and errors of all
            return {"error": f"{type(exc).__name__}: {exc}"}

    def ludic_receipt(self) -> dict[str, Any]:
        """Checksum, type and shape of every tensor that waits to be applied, how many updates were
        applied, what the host's copy is, and the seconds that each part took the last time."""
        engine: Any = getattr(self, "weight_transfer_engine", None)
        if not hasattr(engine, "receipt"):
            return _NO_ENGINE
        tensors = engine.receipt()
        state = {"applied": engine.applied, "holds": engine.holds, "seconds": engine.seconds}
        return {"tensors": tensors, **state}

    def ludic_place(self) -> dict[str, Any]:
        """Where this worker is: whose shared memory it sees, and its GPU."""
        return asdict(Place.of(torch.device(getattr(self, "device", None) or "cpu")))

    def ludic_adapter_limits(self) -> dict[str, Any]:
        """Which adapters this worker takes; `enabled` is False where it takes none."""
        manager = _manager(self)
        if manager is None:
            return {"enabled": False}
        settings = manager.lora_config
        return {
            "enabled": True,
            "max_rank": int(settings.max_lora_rank),
            "max_loras": int(settings.max_loras),
        }

    def ludic_adapter_receipt(self) -> dict[str, Any]:
        """Checksum, type and shape of every tensor of the adapter that was loaded last, and whether
        it lies where a forward pass finds it."""
        manager = _manager(self)
        adapters = {} if manager is None else manager.list_adapters()
        if manager is None or not adapters:
            return {"error": "this worker holds no adapter"}
        newest = max(adapters)  # the server counts them up
        return {
            "active": newest in manager.lora_index_to_id,
            "held": len(adapters),
            "tensors": receipt(_tensors(adapters[newest], manager.packed_modules)),
        }


def _manager(worker: Any) -> Any:
    """vLLM's own record of a worker's adapters; None where it was started without any."""
    lora = getattr(getattr(worker, "model_runner", None), "lora_manager", None)
    return getattr(lora, "_adapter_manager", None)


def _tensors(adapter: Any, packed: dict[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    """The adapter's tensors under the trainer's names: what vLLM computes in one matrix (q, k and
    v) is several there."""
    for module, layer in adapter.loras.items():
        several = isinstance(layer.lora_a, list)
        names = packed.get(module, []) if several else [module]
        for kind in ("lora_a", "lora_b"):
            matrices = getattr(layer, kind)
            for index, tensor in enumerate(matrices if several else [matrices]):
                if tensor is not None:
                    name = names[index] if index < len(names) else f"{module}.{index}"
                    yield f"{name}.{'lora_A' if kind == 'lora_a' else 'lora_B'}", tensor
