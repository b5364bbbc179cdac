"""SPO (Xu and Ding 2025, "Single-stream Policy Optimization").

No groups: each rollout is compared with what its task has paid so far.

    A = r − v̂,  v̂ = α/(α + β);  afterwards α ← λα + r, β ← λβ + 1 − r,  r = R in [0, 1]

A is normalised over the batch; the loss is the clipped surrogate, token_mean. Tasks are drawn
∝ √(v̂(1 − v̂)) + ε (`BetaTracker.sampling_weights`). The tracker is saved with the checkpoint.

Defaults: constant λ = 0.9, clip (0.8, 1.2), prior v̂ = 0.5 worth 8 outcomes. Where returns lie in
another interval, `returns=(low, high)` maps it to [0, 1]: r = (R − low) / (high − low).
Departures from the paper: it derives λ from the policy's drift (`forgetting={}` here and in a run
file, or a `DriftForgetting`; the trainer then measures each update) and starts v̂ from outcomes
sampled beforehand (`update`). Several rollouts of one task in a batch share the v̂ from before it,
and forget once.
"""

from __future__ import annotations

from collections.abc import Mapping

from ludic.errors import ConfigError
from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.algorithms.grpo import TokenClippedSurrogateLoss
from ludic.training.credit_assignment.value_tracker import (
    BetaTracker,
    DriftForgetting,
    TrackedAdvantage,
    forgetting_of,
)
from ludic.training.losses.aggregation import Aggregation, token_mean
from ludic.training.losses.composite import with_entropy


@remembered("spo")
def make_spo(
    *,
    tracker: BetaTracker | None = None,
    forgetting: float | DriftForgetting | Mapping[str, float] = 0.9,
    returns: tuple[float, float] = (0.0, 1.0),
    clip: tuple[float, float] = (0.8, 1.2),
    aggregation: Aggregation = token_mean,
    entropy_coeff: float = 0.0,
) -> RLAlgorithm:
    """Tracked per-task values as baselines, with the clipped surrogate; no groups. A return
    outside `returns` is a `CreditError`. `forgetting` is λ, or a table of `DriftForgetting`'s
    arguments, `{}` for its defaults; a `tracker` of your own has one already."""
    if tracker is None:
        tracker = BetaTracker(forgetting_of(forgetting))
    elif forgetting != 0.9:
        raise ConfigError("make_spo: give `forgetting` to the tracker, or leave the tracker out")
    loss = TokenClippedSurrogateLoss(clip=clip, aggregation=aggregation)
    credit = TrackedAdvantage(tracker, returns=returns)
    return RLAlgorithm("spo", credit, with_entropy(loss, entropy_coeff, aggregation))
