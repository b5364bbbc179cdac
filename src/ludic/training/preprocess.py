"""Changes to a whole macro-batch before it is trained on. NumPy only.

A preprocess takes a `SAWBatch` and returns another one. The trainer runs it once per batch, after
credit, filters and scorers and before the batch is split, so that it may use quantities of the
whole batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ludic.errors import ConfigError, NotTrainableError
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch, SAWItem, TurnSpan
from ludic.types import RolloutStepKey

PreprocessFn = Callable[[SAWBatch], SAWBatch]


@runtime_checkable
class HasPreprocess(Protocol):
    """A loss that needs every macro-batch changed before it is split."""

    @property
    def preprocess(self) -> PreprocessFn | None: ...


def preprocess_of(loss: object) -> PreprocessFn | None:
    """The preprocess of a loss, if it has one."""
    return loss.preprocess if isinstance(loss, HasPreprocess) else None


@dataclass(frozen=True, slots=True)
class Chain:
    """Several preprocesses, one after the other, left to right."""

    steps: tuple[PreprocessFn, ...]

    def __call__(self, batch: SAWBatch) -> SAWBatch:
        for step in self.steps:
            batch = step(batch)
        return batch


def steps_of(step: PreprocessFn | None) -> tuple[PreprocessFn, ...]:
    """The steps that a preprocess is made of."""
    if isinstance(step, Chain):
        return step.steps
    return () if step is None else (step,)


def chain(*steps: PreprocessFn | None) -> PreprocessFn | None:
    """All the steps as one, without duplicates; None if there are none."""
    todo: list[PreprocessFn] = []
    for step in steps:
        for part in steps_of(step):
            if part not in todo:
                todo.append(part)
    if len(todo) < 2:
        return todo[0] if todo else None
    return Chain(tuple(todo))


def turn_weights(batch: SAWBatch) -> dict[RolloutStepKey, float]:
    """The weight of each turn; one that forked into several items appears once."""
    return {
        (item.rollout_id, span.turn_index): span.weight
        for item in batch.items
        for span in item.turns
    }


def rescale(batch: SAWBatch, scale: float, shift: float) -> SAWBatch:
    """Replaces every weight w by scale·w + shift."""

    def changed(item: SAWItem) -> SAWItem:
        tokens = item.attachments.token_weights
        if tokens is not None:
            tokens = (scale * tokens.astype(np.float64) + shift).astype(np.float32)
        spans = (replace(span, weight=scale * span.weight + shift) for span in item.turns)
        return replace(
            item,
            weight=scale * item.weight + shift,
            turns=tuple(spans),
            attachments=replace(item.attachments, token_weights=tokens),
        )

    return replace(batch, items=tuple(changed(item) for item in batch.items))


def subtract_mean(batch: SAWBatch) -> SAWBatch:
    """Subtracts the mean weight of the batch's turns from every weight: REINFORCE's baseline."""
    weights = list(turn_weights(batch).values())
    return rescale(batch, 1.0, -float(np.mean(weights))) if weights else batch


def drop_zero_variance_groups(batch: SAWBatch) -> SAWBatch:
    """Drops groups whose weights are all 0: they have no gradient, but would count in the
    normalisers. The drops are counted in turns, in `meta["dropped"]["zero_variance_group"]`."""
    alive = {item.group_id for item in batch.items if any(span.weight for span in item.turns)}
    items = [item for item in batch.items if item.group_id in alive or item.group_id is None]
    if len(items) == len(batch.items):
        return batch
    dropped = Counter(batch.meta.get("dropped", {}))
    dropped["zero_variance_group"] += len(turn_weights(batch)) - len(
        turn_weights(replace(batch, items=tuple(items)))
    )
    return make_batch(items, {**batch.meta, "dropped": dict(dropped)})


@dataclass(frozen=True, slots=True)
class KLInReward:
    """k1 = logp − logp_ref as a penalty in the reward: each action token is charged coeff·k1, and
    its weight is reduced by the charges of all tokens from itself up to the `horizon`.

    "rollout" (everything the agent wrote from there on) gives the policy gradient of the KL of
    whole rollouts; "turn" stops at the end of the turn; "token" counts only the token itself, which
    has the expected gradient of a k2 loss. Uses the log-probs of the policy that sampled.
    """

    coeff: float
    horizon: Literal["token", "turn", "rollout"] = "rollout"

    def __post_init__(self) -> None:
        if self.horizon not in ("token", "turn", "rollout"):
            raise ConfigError(f"KLInReward.horizon={self.horizon!r}: token, turn or rollout")

    def __call__(self, batch: SAWBatch) -> SAWBatch:
        charges = [self.coeff * _k1(item) for item in batch.items]
        if self.horizon != "token":
            charges = self._charged_ahead(batch, charges)
        items = (_charge(i, c) for i, c in zip(batch.items, charges, strict=True))
        return replace(batch, items=tuple(items))

    def _charged_ahead(
        self, batch: SAWBatch, charges: list[NDArray[np.float64]]
    ) -> list[NDArray[np.float64]]:
        """Each token's charge plus those of the later tokens of its turn or rollout."""
        ahead = [np.empty_like(charge) for charge in charges]
        sums: dict[RolloutStepKey | str, float] = {}
        for position, span in _backwards(batch):
            rollout = batch.items[position].rollout_id
            key = rollout if self.horizon == "rollout" else (rollout, span.turn_index)
            own = charges[position][span.start : span.end]
            total = sums.get(key, 0.0) + own[::-1].cumsum()[::-1]
            ahead[position][span.start : span.end] = total
            sums[key] = float(total[0])
        return ahead


def _backwards(batch: SAWBatch) -> Iterator[tuple[int, TurnSpan]]:
    """Spans from the last turn to the first; those of one turn in reverse order."""
    spans = [(p, span) for p, item in enumerate(batch.items) for span in item.turns]
    # A stable sort read backwards: within one turn, later spans come first.
    ordered = sorted(spans, key=lambda placed: placed[1].turn_index)
    return reversed(ordered)


def _k1(item: SAWItem) -> NDArray[np.float64]:
    sampled, reference = item.attachments.behavior_logprobs, item.attachments.reference_logprobs
    if sampled is None or reference is None:
        raise NotTrainableError(
            f"rollout {item.rollout_id!r}: KLInReward needs behaviour and reference log-probs; "
            "sample with log-probs, and score the batch with a reference first"
        )
    return sampled.astype(np.float64) - reference


def _charge(item: SAWItem, charge: NDArray[np.float64]) -> SAWItem:
    weights = item.attachments.token_weights
    if weights is None:
        weights = np.full(len(charge), item.weight, dtype=np.float32)
    attached = replace(item.attachments, token_weights=(weights - charge).astype(np.float32))
    return replace(item, attachments=attached)
