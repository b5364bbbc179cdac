"""Batch sources: where the trainer's macro-batches come from. Imports no torch."""

from ludic.training.batching.offline_batch_source import OfflineBatchSource
from ludic.training.batching.replay_buffer import ReplayBufferSource
from ludic.training.batching.rollout_batch_source import DynamicSampling, RolloutBatchSource
from ludic.training.batching.source import SamplingAhead

__all__ = [
    "DynamicSampling",
    "OfflineBatchSource",
    "ReplayBufferSource",
    "RolloutBatchSource",
    "SamplingAhead",
]
