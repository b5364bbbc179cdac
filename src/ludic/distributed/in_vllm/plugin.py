"""What vLLM loads from Ludic: an entry point in the group `vllm.general_plugins`."""

from __future__ import annotations

from ludic.inference.vllm.flags import BACKEND


def register() -> None:
    """Registers Ludic's weight transfer engine. vLLM calls this in each of its processes, maybe
    more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "ludic.distributed.in_vllm.receiver", "LudicWeightTransferEngine"
        )
