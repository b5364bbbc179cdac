"""Bringing weights to samplers, and training on several ranks. Names that need torch load late."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ludic.distributed.interfaces import LazyWeights, PolicyPublisher, PublishReport, Weights

if TYPE_CHECKING:
    from ludic.distributed.adapter.publisher import AdapterPolicyPublisher
    from ludic.distributed.adapter.weights import AdapterWeights
    from ludic.distributed.fsdp import init_mesh, load_sharded, meta_parameters, shard_policy
    from ludic.distributed.local import LocalPolicyPublisher, Rank0OnlyPublisher
    from ludic.distributed.publisher import BroadcastPolicyPublisher
    from ludic.distributed.weights import ModelWeights
    from ludic.distributed.world import World

_LAZY = {
    "AdapterPolicyPublisher": "ludic.distributed.adapter.publisher",
    "AdapterWeights": "ludic.distributed.adapter.weights",
    "BroadcastPolicyPublisher": "ludic.distributed.publisher",
    "LocalPolicyPublisher": "ludic.distributed.local",
    "ModelWeights": "ludic.distributed.weights",
    "Rank0OnlyPublisher": "ludic.distributed.local",
    "World": "ludic.distributed.world",
    "init_mesh": "ludic.distributed.fsdp",
    "load_sharded": "ludic.distributed.fsdp",
    "meta_parameters": "ludic.distributed.fsdp",
    "shard_policy": "ludic.distributed.fsdp",
}

__all__ = [
    "AdapterPolicyPublisher",
    "AdapterWeights",
    "BroadcastPolicyPublisher",
    "LazyWeights",
    "LocalPolicyPublisher",
    "ModelWeights",
    "PolicyPublisher",
    "PublishReport",
    "Rank0OnlyPublisher",
    "Weights",
    "World",
    "init_mesh",
    "load_sharded",
    "meta_parameters",
    "shard_policy",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
