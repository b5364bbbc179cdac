"""Batch sources: where the trainer's macro-batches come from. Imports no torch."""

from ludic.training.batching.ahead import SamplingAhead as SamplingAhead
from ludic.training.batching.offline_batch_source import OfflineBatchSource as OfflineBatchSource
from ludic.training.batching.replay_buffer import ReplayBufferSource as ReplayBufferSource
from ludic.training.batching.rollout_batch_source import DynamicSampling as DynamicSampling
from ludic.training.batching.rollout_batch_source import RolloutBatchSource as RolloutBatchSource
