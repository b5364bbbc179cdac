"""The contract of credit: how much each turn of each rollout is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from ludic.types import Rollout, RolloutStepKey


class CreditAssigner(Protocol):
    """Gives every turn of every rollout its weight.

    One that remembers earlier batches is also `Stateful`; its `compute` is called once per batch.
    """

    def compute(self, rollouts: Sequence[Rollout]) -> Mapping[RolloutStepKey, float]: ...


@runtime_checkable
class ComparesGroups(Protocol):
    """Credit that compares the `group_size` rollouts of a group with each other."""

    @property
    def group_size(self) -> int: ...


@runtime_checkable
class AllowsPartialGroups(Protocol):
    """Credit that can also compare what is left of a group which lost a member."""

    def with_partial_groups(self) -> CreditAssigner:
        """Returns this credit for groups of at most `group_size`."""


@runtime_checkable
class WatchesDrift(Protocol):
    """Credit that forgets as the policy moves.

    While `watches_drift` is true, the trainer measures every update and reports its KL per token.
    """

    @property
    def watches_drift(self) -> bool: ...

    def observe_drift(self, kl: float) -> None: ...
