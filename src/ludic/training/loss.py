"""All losses by name. Each lives in the file of the algorithm that brought it."""

from ludic.training.algorithms.cispo import CISPOLoss
from ludic.training.algorithms.gmpo import GMPOLoss
from ludic.training.algorithms.grpo import TokenClippedSurrogateLoss
from ludic.training.algorithms.gspo import SequenceClippedSurrogateLoss
from ludic.training.algorithms.opd import OnPolicyDistillationLoss
from ludic.training.algorithms.reinforce import ReinforceLoss
from ludic.training.algorithms.reinforce_baseline import ReinforceBaselineLoss
from ludic.training.algorithms.sapo import SAPOLoss
from ludic.training.algorithms.sft import MaskedCausalLMCrossEntropyLoss
from ludic.training.losses.aggregation import (
    Aggregation,
    Constant,
    GroupMean,
    SequenceMean,
    TokenMean,
)
from ludic.training.losses.composite import CompositeLoss, EntropyBonus
from ludic.training.losses.corrections import CorrectedLoss, MaskedImportance, TruncatedImportance
from ludic.training.losses.kl import TokenKLLoss
from ludic.training.types import Loss, LossBatch, LossStats, Stat, TokenLogProbs

GSPOLoss = SequenceClippedSurrogateLoss

__all__ = [
    "Aggregation",
    "CISPOLoss",
    "CompositeLoss",
    "Constant",
    "CorrectedLoss",
    "EntropyBonus",
    "GMPOLoss",
    "GSPOLoss",
    "GroupMean",
    "Loss",
    "LossBatch",
    "LossStats",
    "MaskedCausalLMCrossEntropyLoss",
    "MaskedImportance",
    "OnPolicyDistillationLoss",
    "ReinforceBaselineLoss",
    "ReinforceLoss",
    "SAPOLoss",
    "SequenceClippedSurrogateLoss",
    "SequenceMean",
    "Stat",
    "TokenClippedSurrogateLoss",
    "TokenKLLoss",
    "TokenLogProbs",
    "TokenMean",
    "TruncatedImportance",
]
