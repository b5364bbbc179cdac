"""What vLLM loads from Ludic: an entry point in the group `vllm.general_plugins`.

It registers a weight transfer engine named `ludic`. `ReceiptExtension` is added to vLLM's workers
by `--worker-extension-cls`, and lets the trainer ask what arrived.
"""

from __future__ import annotations

from typing import Any

BACKEND = "ludic"


def register() -> None:
    """Makes the backend known. vLLM calls this in each of its processes, maybe more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "ludic.distributed.in_vllm.receiver", "LudicWeightTransferEngine"
        )


class ReceiptExtension:
    """Methods that `/collective_rpc` may call on a worker."""

    def ludic_receipt(self) -> dict[str, Any]:
        """Checksum, type and shape of every tensor that waits to be applied, how many updates were
        applied, and the seconds that each part took the last time."""
        engine = getattr(self, "weight_transfer_engine", None)
        if engine is None or not hasattr(engine, "receipt"):
            return {"error": "the server was started without the weight transfer backend 'ludic'"}
        tensors = engine.receipt()
        return {"tensors": tensors, "applied": engine.applied, "seconds": engine.seconds}
