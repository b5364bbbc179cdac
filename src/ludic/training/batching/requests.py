"""The requests of a batch source: from a function of the step, or from a curriculum."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ludic.errors import CheckpointError, ConfigError
from ludic.rollouts.curricula import Curriculum
from ludic.rollouts.requests import RolloutRequest
from ludic.rollouts.strategies import GRPORequestStrategy, IdentityStrategy, RequestStrategy
from ludic.training.algorithm import RLAlgorithm
from ludic.training.stateful import Stateful
from ludic.types import Rollout

Requests: TypeAlias = Sequence[RolloutRequest]
RequestFn: TypeAlias = Callable[..., Requests | Awaitable[Requests]]
"""`fn(step)` or `fn()`. One that remembers what it returned is also `Stateful`."""


class RequestFeed:
    """Requests from a function or a curriculum, through one interface, and their groups.

    A curriculum is asked for the number needed and told the outcomes. A function that takes an
    argument is given the step; any other is called without one. Without a `strategy`, requests
    become groups of the algorithm's size, and those that have a `group_id` stay as they are.
    """

    def __init__(
        self,
        source: RequestFn | Curriculum,
        algorithm: RLAlgorithm,
        strategy: RequestStrategy | None,
        rollouts_per_update: int | None,
    ) -> None:
        self.source = source
        self.strategy = choose_strategy(strategy, algorithm)
        self._keeps_groups = strategy is None
        count, size = rollouts_per_update, self.strategy.group_size
        if count is not None:
            algorithm.check_rollouts_per_update(count)
            if count % size:
                raise ConfigError(
                    f"rollouts_per_update={count} is not a multiple of the request strategy's "
                    f"group_size={size}: a batch holds whole groups"
                )
            count //= size
        self.count = count
        self._curriculum = source if isinstance(source, Curriculum) else None
        if self._curriculum is not None:
            if count is None:
                raise ConfigError(
                    "a curriculum needs to know how many requests to make: set rollouts_per_update"
                )
        elif not callable(source):
            raise ConfigError(f"request_fn={source!r} is neither a function nor a Curriculum")
        else:
            self._takes_step = _takes_argument(source)

    async def next(self, step: int, count: int | None = None) -> list[RolloutRequest]:
        """The requests of `step`; at most `count` of them, if given."""
        if self._curriculum is not None:
            wanted = self.count if count is None else count
            assert wanted is not None
            return list(self._curriculum.next_requests(wanted))
        assert callable(self.source)
        given = self.source(step) if self._takes_step else self.source()
        requests = list(await given if inspect.isawaitable(given) else given)
        if not requests:
            raise ConfigError(f"request_fn gave no requests for step {step}")
        return requests if count is None else requests[:count]

    def expand(self, requests: Requests, prefix: str) -> list[RolloutRequest]:
        """The requests of whole groups; the groups' names begin with `prefix`."""
        strategy = self.strategy
        if self._keeps_groups and all(r.group_id is not None for r in requests):
            strategy = IdentityStrategy()
        return strategy.expand(requests, prefix=prefix)

    def report(self, rollouts: Sequence[Rollout]) -> None:
        """Tells the curriculum how it went."""
        if self._curriculum is not None:
            self._curriculum.report(rollouts)

    def state_dict(self) -> Mapping[str, Any] | None:
        return dict(self.source.state_dict()) if isinstance(self.source, Stateful) else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if isinstance(self.source, Stateful) == (state is None):
            raise CheckpointError(
                "the checkpoint and this run's request_fn do not match: one of them has a state "
                "and the other has none; resume with the request_fn that the run began with"
            )
        if isinstance(self.source, Stateful) and state is not None:
            self.source.load_state_dict(state)


def choose_strategy(strategy: RequestStrategy | None, algorithm: RLAlgorithm) -> RequestStrategy:
    """The given strategy, checked against the algorithm's group size; without one, the strategy
    that the algorithm needs."""
    size = algorithm.group_size
    if strategy is None:
        return IdentityStrategy() if size is None else GRPORequestStrategy(size)
    if size is not None and strategy.group_size not in (1, size):
        raise ConfigError(
            f"the request strategy makes groups of {strategy.group_size}, and the algorithm "
            f"compares groups of {size}: give both the same group_size"
        )
    return strategy


def _takes_argument(function: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    return any(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)
