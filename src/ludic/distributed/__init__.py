"""Bringing weights to samplers, and training on several ranks. Names that need torch load late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludic.distributed.interfaces import LazyWeights, PolicyPublisher, PublishReport, Weights
from ludic.lazy import late_names

if TYPE_CHECKING:
    from ludic.distributed.local import LocalPolicyPublisher, Rank0OnlyPublisher
    from ludic.distributed.publisher import AdapterPolicyPublisher, BroadcastPolicyPublisher
    from ludic.distributed.vllm.adapter.weights import AdapterWeights
    from ludic.sharding.fsdp import init_mesh, load_sharded, meta_parameters, shard_policy
    from ludic.sharding.weights import ModelWeights
    from ludic.sharding.world import World

__getattr__ = late_names(
    __name__,
    {
        "AdapterPolicyPublisher": "ludic.distributed.publisher",
        "AdapterWeights": "ludic.distributed.vllm.adapter.weights",
        "BroadcastPolicyPublisher": "ludic.distributed.publisher",
        "LocalPolicyPublisher": "ludic.distributed.local",
        "ModelWeights": "ludic.sharding.weights",
        "Rank0OnlyPublisher": "ludic.distributed.local",
        "World": "ludic.sharding.world",
        "init_mesh": "ludic.sharding.fsdp",
        "load_sharded": "ludic.sharding.fsdp",
        "meta_parameters": "ludic.sharding.fsdp",
        "shard_policy": "ludic.sharding.fsdp",
    },
)

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
