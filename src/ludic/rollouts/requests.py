"""What to roll out: pure data, so that it can be stored, sent and repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludic.inference.sampling import InferenceSpec
from ludic.types import EnvSpec, ProtocolSpec


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A wish for `num_episodes` episodes of one environment under one protocol.

    Episodes of one request differ in the seeds derived from `env_seed` and `sampling_seed`.
    Requests with the same `group_id` share the environment's seed and are compared with each
    other; `task_key` names the task across batches.
    """

    env: EnvSpec
    protocol: ProtocolSpec
    env_seed: int | None = None
    sampling_seed: int | None = None
    inference: InferenceSpec | None = None
    num_episodes: int = 1
    group_id: str | None = None
    task_key: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
