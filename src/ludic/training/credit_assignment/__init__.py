"""Credit: how much each turn of each rollout is worth. NumPy only, so an actor can run it."""

from ludic.training.credit_assignment.returns import (
    ConstantCredit,
    EpisodicReturn,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    MonteCarloReturn,
    PerStepReward,
)
from ludic.training.credit_assignment.value_tracker import (
    BetaTracker,
    DriftForgetting,
    TrackedAdvantage,
)

__all__ = [
    "BetaTracker",
    "ConstantCredit",
    "DriftForgetting",
    "EpisodicReturn",
    "GroupNormalizedReturn",
    "HybridNormalizedReturn",
    "MonteCarloReturn",
    "PerStepReward",
    "TrackedAdvantage",
]
