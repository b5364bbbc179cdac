"""From requests to episodes, each with its id and seeds."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ludic.errors import ConfigError
from ludic.plumbing.records import Record
from ludic.rollouts.requests import RolloutRequest
from ludic.seeding import derive_seed
from ludic.types import Rollout


class PlannedEpisode(Record, frozen=True):
    """One episode to run; `attempt` counts the retries."""

    id: str
    request: RolloutRequest
    env_seed: int
    sampling_seed: int
    attempt: int = 0

    @property
    def group_id(self) -> str | None:
        return self.request.group_id

    def retried(self) -> PlannedEpisode:
        """The same episode with new sampling noise: the same noise could fail the same way."""
        attempt = self.attempt + 1
        return replace(
            self,
            sampling_seed=derive_seed(self.sampling_seed, "retry", attempt),
            attempt=attempt,
        )


def plan_episodes(
    requests: Sequence[RolloutRequest], *, seed: int, prefix: str
) -> tuple[PlannedEpisode, ...]:
    """Lays out all episodes of `requests` in order. Pure: the same arguments, the same plan.

    Ids are `prefix/request/episode`. A request without seeds gets them from `seed`, `prefix` and
    its position; the requests of one group get one environment seed.
    """
    episodes: list[PlannedEpisode] = []
    group_seeds: dict[str, int] = {}
    for position, request in enumerate(requests):
        env_seed = _env_seed(request, position, seed, prefix)
        if request.group_id is not None:
            shared = group_seeds.setdefault(request.group_id, env_seed)
            if shared != env_seed:
                raise ConfigError(
                    f"group {request.group_id!r} has requests with env_seed={shared} and "
                    f"env_seed={env_seed}: the members of a group share the environment's seed"
                )
        sampling_seed = request.sampling_seed
        if sampling_seed is None:
            sampling_seed = derive_seed(seed, prefix, "sampling", position)
        several = request.num_episodes > 1
        for number in range(request.num_episodes):
            own_env = several and request.group_id is None
            episodes.append(
                PlannedEpisode(
                    id=f"{prefix}/{position}/{number}",
                    request=request,
                    env_seed=derive_seed(env_seed, "episode", number) if own_env else env_seed,
                    sampling_seed=derive_seed(sampling_seed, "episode", number)
                    if several
                    else sampling_seed,
                )
            )
    return tuple(episodes)


def place_in_plan(rollout: Rollout) -> tuple[int, int]:
    """Request and number of the episode that a rollout is of, by its id."""
    _, position, number = rollout.episode_id.rsplit("/", 2)
    return int(position), int(number)


def _env_seed(request: RolloutRequest, position: int, seed: int, prefix: str) -> int:
    if request.env_seed is not None:
        return request.env_seed
    if request.group_id is not None:
        return derive_seed(seed, prefix, "group", request.group_id)
    return derive_seed(seed, prefix, "env", position)
