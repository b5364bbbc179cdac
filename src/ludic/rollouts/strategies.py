"""Control within a batch: how its episodes relate to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from ludic.errors import ConfigError
from ludic.rollouts.requests import RolloutRequest
from ludic.seeding import derive_seed


class RequestStrategy(Protocol):
    """Rewrites the requests of one batch before they are run. `group_size` is how many episodes
    come out for one that goes in."""

    @property
    def group_size(self) -> int: ...

    def expand(
        self, requests: Sequence[RolloutRequest], *, prefix: str = ""
    ) -> list[RolloutRequest]:
        """`prefix` keeps the group ids of different batches apart."""
        ...


@dataclass(frozen=True, slots=True)
class IdentityStrategy:
    """Leaves the requests as they are."""

    @property
    def group_size(self) -> int:
        return 1

    def expand(
        self, requests: Sequence[RolloutRequest], *, prefix: str = ""
    ) -> list[RolloutRequest]:
        return list(requests)


@dataclass(frozen=True, slots=True)
class GRPORequestStrategy:
    """Every episode asked for becomes a group of `group_size`: one task, several attempts.

    The members share the environment's seed and differ in the sampling's. In an environment of
    several agents the groups are narrowed to each role when credit is assigned.
    """

    group_size: int

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"GRPORequestStrategy(group_size={self.group_size}): must be >= 1")

    def expand(
        self, requests: Sequence[RolloutRequest], *, prefix: str = ""
    ) -> list[RolloutRequest]:
        expanded: list[RolloutRequest] = []
        for position, request in enumerate(requests):
            if request.group_id is not None:
                raise ConfigError(
                    f"request {position} is in group {request.group_id!r} already: expand requests "
                    "only once, or use IdentityStrategy for requests that already have groups"
                )
            for number in range(request.num_episodes):
                expanded.extend(self._group(request, position, number, prefix))
        return expanded

    def _group(
        self, request: RolloutRequest, position: int, number: int, prefix: str
    ) -> list[RolloutRequest]:
        several = request.num_episodes > 1
        path = ("episode", number) if several else ()
        env_seed, sampling_seed = request.env_seed, request.sampling_seed
        member = replace(
            request,
            num_episodes=1,
            group_id=f"{prefix}group-{position}" + (f"-{number}" if several else ""),
            env_seed=derive_seed(env_seed, *path) if env_seed is not None and path else env_seed,
        )
        return [
            member
            if sampling_seed is None
            else replace(
                member, sampling_seed=derive_seed(sampling_seed, *path, "member", position_in_group)
            )
            for position_in_group in range(self.group_size)
        ]
