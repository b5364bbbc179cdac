"""What to roll out: requests, how those of a batch relate, the episodes that they make, and
what decides which come next.

Requests and episodes are pure data, so that they can be stored, sent and repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from msgspec import field
from msgspec.structs import replace

from ludic.errors import CheckpointError, ConfigError
from ludic.inference.sampling import InferenceSpec
from ludic.plumbing.records import Record
from ludic.seeding import derive_seed, derived
from ludic.types import EnvSpec, Info, ProtocolSpec, Rollout


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

    group_size: ClassVar[int] = 1

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
        path = ("episode", number) if request.num_episodes > 1 else ()
        member = replace(
            request,
            num_episodes=1,
            group_id=f"{prefix}group-{position}" + (f"-{number}" if path else ""),
            env_seed=derived(request.env_seed, *path) if path else request.env_seed,
        )
        return [
            replace(member, sampling_seed=derived(request.sampling_seed, *path, "member", place))
            for place in range(self.group_size)
        ]


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
        seed = derive_seed(self.sampling_seed, "retry", attempt)
        return replace(self, sampling_seed=seed, attempt=attempt)


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
        for number in range(request.num_episodes):
            own_env, own_sampling = env_seed, sampling_seed
            if request.num_episodes > 1:
                own_sampling = derive_seed(sampling_seed, "episode", number)
                if request.group_id is None:
                    own_env = derive_seed(env_seed, "episode", number)
            name = f"{prefix}/{position}/{number}"
            episodes.append(PlannedEpisode(name, request, own_env, own_sampling))
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


LABEL = "curriculum"
"""The key in `meta` that names the part of a curriculum a request, or its rollout, belongs to."""


@runtime_checkable
class Curriculum(Protocol):
    """Decides the next requests, and is told how they went. Its state is JSON, for checkpoints."""

    def next_requests(self, count: int) -> list[RolloutRequest]:
        """The next `count` requests, of one episode each; a strategy may make groups of them."""
        ...

    def report(self, rollouts: Sequence[Rollout]) -> None:
        """Takes every rollout of the batch, failed ones included."""
        ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class FixedMix:
    """Kinds of requests in fixed proportions.

    All requests so far stay as close to the proportions as whole numbers allow, so that even small
    batches are mixed. A request without an `env_seed` gets a new one each time.
    """

    def __init__(self, mix: Mapping[str, tuple[RolloutRequest, float]], *, seed: int = 0) -> None:
        if not mix:
            raise ConfigError("FixedMix: give at least one kind of request")
        for name, (_, weight) in mix.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigError(f"FixedMix: the weight of {name!r} is {weight}; must be > 0")
        total = math.fsum(weight for _, weight in mix.values())
        self._requests = {name: request for name, (request, _) in mix.items()}
        self._shares = {name: weight / total for name, (_, weight) in mix.items()}
        self._given = dict.fromkeys(mix, 0)
        self._seed = seed

    def next_requests(self, count: int) -> list[RolloutRequest]:
        return [self._next() for _ in range(count)]

    def _next(self) -> RolloutRequest:
        total = sum(self._given.values()) + 1
        name = max(self._given, key=lambda n: self._shares[n] * total - self._given[n])
        number = self._given[name]
        self._given[name] += 1
        return seeded(self._requests[name], name, number, self._seed)

    def report(self, rollouts: Sequence[Rollout]) -> None:
        """A fixed mix learns nothing from outcomes."""

    def state_dict(self) -> Mapping[str, Any]:
        return {"given": dict(self._given)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_names("FixedMix", state["given"], self._given)
        self._given = {name: int(state["given"][name]) for name in self._given}


def seeded(request: RolloutRequest, name: str, number: int, seed: int) -> RolloutRequest:
    """The `number`-th request of part `name`, labelled and seeded. An `env_seed` that the request
    already has stays: it is the task."""
    env_seed = request.env_seed
    return replace(
        request,
        env_seed=derive_seed(seed, name, "env", number) if env_seed is None else env_seed,
        sampling_seed=derive_seed(seed, name, "sampling", number),
        meta={**request.meta, LABEL: name},
    )


def check_names(what: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    if saved.keys() != present.keys():
        raise CheckpointError(
            f"{what}: the checkpoint knows {sorted(saved)}, this run {sorted(present)}: resume "
            "with the tasks that the run began with"
        )
