"""What is asked of the actors: the curriculum's requests as units, and how many at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ludic.errors import CheckpointError, ConfigError
from ludic.pipeline.ledger import Asked
from ludic.rollouts.curricula import Curriculum
from ludic.rollouts.requests import RequestStrategy, RolloutRequest
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.rollout_batch_source import RequestFeed, RequestFn
from ludic.types import Rollout


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be between actors and trainer. `groups` counts units from when they are asked
    for until a checkpoint has what became of them; None: as many as one checkpoint interval and
    the lag need. `bytes` bounds the finished groups: beyond it actors begin no new unit."""

    groups: int | None = None
    bytes: int = 2**30

    def __post_init__(self) -> None:
        if self.bytes < 1 or (self.groups is not None and self.groups < 1):
            raise ConfigError(f"{self}: both must be at least 1")

    def checked(self, groups_per_update: int, checkpoint_every: int, max_lag: int) -> Bounds:
        """The same with `groups` filled in; raises if they could never hold an interval."""
        interval = checkpoint_every * groups_per_update
        if self.groups is None:
            return replace(self, groups=interval + (1 + max_lag) * groups_per_update)
        if self.groups < interval:
            raise ConfigError(
                f"a bound of {self.groups} groups is below the {interval} of one checkpoint "
                f"interval ({checkpoint_every} updates of {groups_per_update} groups), and groups "
                "are kept until a checkpoint has them: raise it (pipeline.max_groups), or save "
                "more often"
            )
        return self


class UnitFeed:
    """Requests from a function or a curriculum, as the units of one update at a time."""

    def __init__(
        self,
        source: RequestFn | Curriculum,
        algorithm: RLAlgorithm,
        rollouts_per_update: int,
        strategy: RequestStrategy | None,
    ) -> None:
        self._feed = RequestFeed(source, algorithm, strategy, rollouts_per_update)
        size = algorithm.group_size or self._feed.strategy.group_size
        self.groups_per_update = rollouts_per_update // size
        self._rollouts_per_update = rollouts_per_update
        self._draws = 0

    async def draw(self) -> list[Asked]:
        """The units of the next update."""
        units = self._units(await self._feed.next(self._draws))
        if len(units) != self.groups_per_update:
            raise ConfigError(
                f"request_fn and the strategy make {len(units)} groups for update {self._draws}, "
                f"and rollouts_per_update={self._rollouts_per_update} is "
                f"{self.groups_per_update}: make them agree"
            )
        self._draws += 1
        return [Asked(unit) for unit in units]

    def _units(self, requests: Sequence[RolloutRequest]) -> list[tuple[RolloutRequest, ...]]:
        expanded = self._feed.expand(requests, f"draw-{self._draws}/")
        places = [(r.group_id or f"\0{i}", r) for i, r in enumerate(expanded)]
        return [tuple(r for _, r in unit) for _, unit in groupby(places, key=lambda p: p[0])]

    def report(self, rollouts: Sequence[Rollout]) -> None:
        """Tells the curriculum how it went."""
        self._feed.report(rollouts)

    def state_dict(self) -> Mapping[str, Any]:
        return {"draws": self._draws, "requests": self._feed.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            draws, requests = int(state["draws"]), state["requests"]
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointError(f"not the state of a pipeline's requests: {exc!r}") from exc
        self._feed.load_state_dict(requests)
        self._draws = draws
