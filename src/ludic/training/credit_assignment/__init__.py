"""Credit: how much each turn of each rollout is worth. NumPy only, so an actor can run it."""

from ludic.training.credit_assignment.returns import ConstantCredit as ConstantCredit
from ludic.training.credit_assignment.returns import EpisodicReturn as EpisodicReturn
from ludic.training.credit_assignment.returns import GroupNormalizedReturn as GroupNormalizedReturn
from ludic.training.credit_assignment.returns import (
    HybridNormalizedReturn as HybridNormalizedReturn,
)
from ludic.training.credit_assignment.returns import MonteCarloReturn as MonteCarloReturn
from ludic.training.credit_assignment.returns import PerStepReward as PerStepReward
from ludic.training.credit_assignment.value_tracker import BetaTracker as BetaTracker
from ludic.training.credit_assignment.value_tracker import DriftForgetting as DriftForgetting
from ludic.training.credit_assignment.value_tracker import TrackedAdvantage as TrackedAdvantage
