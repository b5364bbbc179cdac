"""What to roll out: pure data, so that it can be stored, sent and repeated."""

from __future__ import annotations

from msgspec import field

from ludic.errors import ConfigError
from ludic.inference.sampling import InferenceSpec
from ludic.plumbing.records import Record
from ludic.types import EnvSpec, Info, ProtocolSpec


class RolloutRequest(Record, frozen=True):
    """Asks for `num_episodes` episodes of one environment under one protocol.

    A single episode uses the seeds as they are given; several differ in the seeds derived from
    them. Episodes with the same `group_id`, of one request or of several, share the environment's
    seed, differ in the sampling's, and are compared with each other. `task_key` names the task
    across batches; `meta` is copied to the rollouts.
    """

    env: EnvSpec
    protocol: ProtocolSpec
    env_seed: int | None = None
    sampling_seed: int | None = None
    inference: InferenceSpec | None = None
    num_episodes: int = 1
    group_id: str | None = None
    task_key: str | None = None
    meta: Info = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_episodes < 1:
            raise ConfigError(
                f"RolloutRequest.num_episodes={self.num_episodes}: must be at least 1"
            )
