"""From rollouts to gradients: credit, losses, algorithms, batch sources, the trainer.

Names are imported when they are first used, so that an actor, which needs only the credit
assigners and the batch maths, gets by without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES: dict[str, tuple[str, ...]] = {
    "types": (
        "BatchSource",
        "CreditAssigner",
        "Loss",
        "LossBatch",
        "LossStats",
        "PreprocessFn",
        "Stat",
        "Stateful",
        "TokenLogProbs",
    ),
    "credit_assignment": (
        "ConstantCredit",
        "EpisodicReturn",
        "GroupNormalizedReturn",
        "HybridNormalizedReturn",
        "MonteCarloReturn",
        "PerStepReward",
    ),
    "aggregation": (
        "Aggregation",
        "Constant",
        "GroupMean",
        "SequenceMean",
        "TokenMean",
        "group_mean",
        "sequence_mean",
        "token_mean",
    ),
    "loss": (
        "CISPOLoss",
        "CompositeLoss",
        "CorrectedLoss",
        "EntropyBonus",
        "GMPOLoss",
        "GSPOLoss",
        "MaskedCausalLMCrossEntropyLoss",
        "MaskedImportance",
        "OnPolicyDistillationLoss",
        "ReinforceBaselineLoss",
        "ReinforceLoss",
        "SAPOLoss",
        "SequenceClippedSurrogateLoss",
        "TokenClippedSurrogateLoss",
        "TokenKLLoss",
        "TruncatedImportance",
    ),
    "policy_ratio": ("Objective", "PolicyLoss", "PolicyRatio"),
    "preprocess": ("KLInReward", "chain", "drop_zero_variance_groups", "subtract_mean"),
    "value_tracker": ("BetaTracker", "DriftForgetting", "TrackedAdvantage"),
    "task_sampling": ("UncertainTasks",),
    "scoring": (
        "ClientScorer",
        "LocalScorer",
        "RoutedScorer",
        "ScoredBatchSource",
        "Scorer",
        "attach_scores",
    ),
    "algorithm": ("RLAlgorithm",),
    "algorithms": ("list_algorithms", "make_algorithm", "register_algorithm"),
    "algorithms.reinforce": ("make_reinforce",),
    "algorithms.reinforce_baseline": ("make_reinforce_baseline",),
    "algorithms.grpo": ("make_grpo",),
    "algorithms.dr_grpo": ("make_dr_grpo",),
    "algorithms.gspo": ("make_gspo",),
    "algorithms.cispo": ("make_cispo",),
    "algorithms.sapo": ("make_sapo",),
    "algorithms.gmpo": ("make_gmpo",),
    "algorithms.scalerl": ("make_scalerl",),
    "algorithms.spo": ("make_spo",),
    "algorithms.opd": ("make_opd",),
    "algorithms.sft": ("make_sft",),
}
_WHERE = {name: f"ludic.training.{module}" for module, names in _MODULES.items() for name in names}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
