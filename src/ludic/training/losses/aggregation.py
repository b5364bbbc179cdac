"""How token terms become one number, which decides how much a long answer weighs.

An aggregation gives every action token a coefficient from the macro-batch's counts, so that the
loss is a plain sum over tokens, and the shares of micro-batches and ranks add up. Only `Constant`
leaves the policy gradient unbiased; the others divide by lengths that the policy itself chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from ludic.errors import ConfigError
from ludic.registry import AGGREGATIONS
from ludic.training.types import LossBatch

Unit = Literal["turn", "rollout"]


def sequences(batch: LossBatch, unit: Unit) -> tuple[Tensor, Tensor, int]:
    """Each token's turn or rollout, their lengths, and how many the macro-batch has."""
    if unit == "turn":
        return batch.turn_ids, batch.turn_lengths, batch.counts.turns
    return batch.rollout_ids, batch.rollout_lengths, batch.counts.rollouts


@runtime_checkable
class Aggregation(Protocol):
    """How token terms become one loss."""

    def coefficients(self, batch: LossBatch) -> Float[Tensor, " tokens"]:
        """What each action token of the micro-batch counts in the macro-batch's loss."""
        ...


@dataclass(frozen=True, slots=True)
class TokenMean:
    """The mean over all action tokens: a token weighs the same wherever it stands, so a long
    answer weighs more than a short one."""

    def coefficients(self, batch: LossBatch) -> Float[Tensor, " tokens"]:
        return batch.weights.new_full(batch.weights.shape, 1.0 / max(batch.counts.tokens, 1))


@dataclass(frozen=True, slots=True)
class SequenceMean:
    """The mean within each sequence, then over sequences: a token of a long answer weighs less.

    A sequence is a turn's action tokens or, with `unit="rollout"`, a rollout's; never a row.
    """

    unit: Unit = "turn"

    def __post_init__(self) -> None:
        if self.unit not in ("turn", "rollout"):
            raise ConfigError(f'SequenceMean.unit={self.unit!r}: must be "turn" or "rollout"')

    def coefficients(self, batch: LossBatch) -> Float[Tensor, " tokens"]:
        ids, lengths, count = sequences(batch, self.unit)
        return (1.0 / (lengths.to(batch.weights.dtype) * max(count, 1)))[ids]


@dataclass(frozen=True, slots=True)
class GroupMean:
    """The token mean within each group, then over groups: every task weighs the same."""

    def coefficients(self, batch: LossBatch) -> Float[Tensor, " tokens"]:
        lengths = batch.group_lengths.to(batch.weights.dtype)
        return (1.0 / (lengths * max(batch.counts.groups, 1)))[batch.group_ids]


@dataclass(frozen=True, slots=True)
class Constant:
    """The sum over tokens, divided by `length` times the number of rollouts.

    `length` is fixed beforehand (the longest answer allowed, say), so it only scales the learning
    rate: with on-policy data this is the policy gradient itself, divided by `length`.
    """

    length: float

    def __post_init__(self) -> None:
        if not self.length > 0:
            raise ConfigError(f"Constant.length={self.length!r}: must be > 0")

    def coefficients(self, batch: LossBatch) -> Float[Tensor, " tokens"]:
        share = 1.0 / (self.length * max(batch.counts.rollouts, 1))
        return batch.weights.new_full(batch.weights.shape, share)


token_mean: Aggregation = TokenMean()
sequence_mean: Aggregation = SequenceMean()
group_mean: Aggregation = GroupMean()


def make_aggregation(spec: str | Mapping[str, Any] | Aggregation) -> Aggregation:
    """Returns an aggregation as run files name it: `"token_mean"`, `{"kind": "constant", "length":
    64}`. An aggregation is returned as it is."""
    if isinstance(spec, Aggregation):
        return spec
    return AGGREGATIONS.make_from(spec)  # type: ignore[no-any-return]


def describe_aggregation(aggregation: Any) -> Any:
    """The JSON from which `make_aggregation` makes this one again; one of another kind is returned
    as it is."""
    kind = AGGREGATIONS.builtin_name(type(aggregation))
    if kind is None:
        return aggregation
    return {"kind": kind, **asdict(aggregation)}
