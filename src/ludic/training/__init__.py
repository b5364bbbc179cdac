"""From rollouts to gradients: credit, losses, algorithms, batch sources, the trainer.

Names are imported when they are first used, so that an actor, which needs only the credit
assigners and the batch maths, gets by without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludic.lazy import late_names

if TYPE_CHECKING:
    from ludic.rollouts import Curriculum as Curriculum
    from ludic.rollouts import EnvSpec as EnvSpec
    from ludic.rollouts import GRPORequestStrategy as GRPORequestStrategy
    from ludic.rollouts import IdentityStrategy as IdentityStrategy
    from ludic.rollouts import InferenceSpec as InferenceSpec
    from ludic.rollouts import ProtocolSpec as ProtocolSpec
    from ludic.rollouts import RequestStrategy as RequestStrategy
    from ludic.rollouts import RolloutEngine as RolloutEngine
    from ludic.rollouts import RolloutRequest as RolloutRequest
    from ludic.saw import SampleAttachments as SampleAttachments
    from ludic.saw import SampleFilter as SampleFilter
    from ludic.saw import SAWBatch as SAWBatch
    from ludic.saw import SAWItem as SAWItem
    from ludic.training.algorithm import RLAlgorithm as RLAlgorithm
    from ludic.training.algorithms import list_algorithms as list_algorithms
    from ludic.training.algorithms import make_algorithm as make_algorithm
    from ludic.training.algorithms import register_algorithm as register_algorithm
    from ludic.training.algorithms.cispo import make_cispo as make_cispo
    from ludic.training.algorithms.dr_grpo import make_dr_grpo as make_dr_grpo
    from ludic.training.algorithms.gmpo import make_gmpo as make_gmpo
    from ludic.training.algorithms.grpo import make_grpo as make_grpo
    from ludic.training.algorithms.gspo import make_gspo as make_gspo
    from ludic.training.algorithms.opd import make_opd as make_opd
    from ludic.training.algorithms.reinforce import make_reinforce as make_reinforce
    from ludic.training.algorithms.reinforce_baseline import (
        make_reinforce_baseline as make_reinforce_baseline,
    )
    from ludic.training.algorithms.sapo import make_sapo as make_sapo
    from ludic.training.algorithms.scalerl import make_scalerl as make_scalerl
    from ludic.training.algorithms.sft import make_sft as make_sft
    from ludic.training.algorithms.spo import make_spo as make_spo
    from ludic.training.batching import DynamicSampling as DynamicSampling
    from ludic.training.batching import OfflineBatchSource as OfflineBatchSource
    from ludic.training.batching import RolloutBatchSource as RolloutBatchSource
    from ludic.training.batching import SamplingAhead as SamplingAhead
    from ludic.training.batching.scoring import BatchScorer as BatchScorer
    from ludic.training.batching.scoring import ClientScores as ClientScores
    from ludic.training.batching.scoring import LocalScores as LocalScores
    from ludic.training.batching.scoring import ReferenceScorer as ReferenceScorer
    from ludic.training.batching.scoring import RoutedScores as RoutedScores
    from ludic.training.batching.scoring import ScoredBatchSource as ScoredBatchSource
    from ludic.training.batching.scoring import TeacherScorer as TeacherScorer
    from ludic.training.batching.scoring import TokenScores as TokenScores
    from ludic.training.batching.self_play import PastPolicies as PastPolicies
    from ludic.training.batching.self_play import SelfPlay as SelfPlay
    from ludic.training.batching.task_sampling import UncertainTasks as UncertainTasks
    from ludic.training.config import CheckpointConfig as CheckpointConfig
    from ludic.training.config import TrainerConfig as TrainerConfig
    from ludic.training.credit_assignment.returns import ConstantCredit as ConstantCredit
    from ludic.training.credit_assignment.returns import EpisodicReturn as EpisodicReturn
    from ludic.training.credit_assignment.returns import (
        GroupNormalizedReturn as GroupNormalizedReturn,
    )
    from ludic.training.credit_assignment.returns import (
        HybridNormalizedReturn as HybridNormalizedReturn,
    )
    from ludic.training.credit_assignment.returns import MonteCarloReturn as MonteCarloReturn
    from ludic.training.credit_assignment.returns import PerStepReward as PerStepReward
    from ludic.training.credit_assignment.value_tracker import BetaTracker as BetaTracker
    from ludic.training.credit_assignment.value_tracker import DriftForgetting as DriftForgetting
    from ludic.training.credit_assignment.value_tracker import TrackedAdvantage as TrackedAdvantage
    from ludic.training.loss import CISPOLoss as CISPOLoss
    from ludic.training.loss import CompositeLoss as CompositeLoss
    from ludic.training.loss import CorrectedLoss as CorrectedLoss
    from ludic.training.loss import EntropyBonus as EntropyBonus
    from ludic.training.loss import GMPOLoss as GMPOLoss
    from ludic.training.loss import GSPOLoss as GSPOLoss
    from ludic.training.loss import MaskedCausalLMCrossEntropyLoss as MaskedCausalLMCrossEntropyLoss
    from ludic.training.loss import MaskedImportance as MaskedImportance
    from ludic.training.loss import OnPolicyDistillationLoss as OnPolicyDistillationLoss
    from ludic.training.loss import ReinforceBaselineLoss as ReinforceBaselineLoss
    from ludic.training.loss import ReinforceLoss as ReinforceLoss
    from ludic.training.loss import SAPOLoss as SAPOLoss
    from ludic.training.loss import SequenceClippedSurrogateLoss as SequenceClippedSurrogateLoss
    from ludic.training.loss import TokenClippedSurrogateLoss as TokenClippedSurrogateLoss
    from ludic.training.loss import TokenKLLoss as TokenKLLoss
    from ludic.training.loss import TruncatedImportance as TruncatedImportance
    from ludic.training.losses.aggregation import Aggregation as Aggregation
    from ludic.training.losses.aggregation import Constant as Constant
    from ludic.training.losses.aggregation import GroupMean as GroupMean
    from ludic.training.losses.aggregation import SequenceMean as SequenceMean
    from ludic.training.losses.aggregation import TokenMean as TokenMean
    from ludic.training.losses.aggregation import group_mean as group_mean
    from ludic.training.losses.aggregation import make_aggregation as make_aggregation
    from ludic.training.losses.aggregation import sequence_mean as sequence_mean
    from ludic.training.losses.aggregation import token_mean as token_mean
    from ludic.training.losses.policy_ratio import Objective as Objective
    from ludic.training.losses.policy_ratio import PolicyLoss as PolicyLoss
    from ludic.training.losses.policy_ratio import PolicyRatio as PolicyRatio
    from ludic.training.preprocess import KLInReward as KLInReward
    from ludic.training.preprocess import chain as chain
    from ludic.training.preprocess import (
        drop_zero_variance_groups as drop_zero_variance_groups,
    )
    from ludic.training.preprocess import subtract_mean as subtract_mean
    from ludic.training.trainer import Trainer as Trainer
    from ludic.training.types import BatchSource as BatchSource
    from ludic.training.types import CreditAssigner as CreditAssigner
    from ludic.training.types import Loss as Loss
    from ludic.training.types import LossBatch as LossBatch
    from ludic.training.types import LossStats as LossStats
    from ludic.training.types import PreprocessFn as PreprocessFn
    from ludic.training.types import Stat as Stat
    from ludic.training.types import Stateful as Stateful
    from ludic.training.types import TokenLogProbs as TokenLogProbs
    from ludic.training.types import WorksAhead as WorksAhead
    from ludic.types import RolloutStepKey as RolloutStepKey

_MODULES: dict[str, tuple[str, ...]] = {
    "ludic.rollouts": (
        "Curriculum",
        "EnvSpec",
        "GRPORequestStrategy",
        "IdentityStrategy",
        "InferenceSpec",
        "ProtocolSpec",
        "RequestStrategy",
        "RolloutEngine",
        "RolloutRequest",
    ),
    "ludic.saw": ("SAWBatch", "SAWItem", "SampleAttachments", "SampleFilter"),
    "ludic.training.losses.aggregation": (
        "Aggregation",
        "Constant",
        "GroupMean",
        "SequenceMean",
        "TokenMean",
        "group_mean",
        "make_aggregation",
        "sequence_mean",
        "token_mean",
    ),
    "ludic.training.algorithm": ("RLAlgorithm",),
    "ludic.training.algorithms": ("list_algorithms", "make_algorithm", "register_algorithm"),
    "ludic.training.algorithms.cispo": ("make_cispo",),
    "ludic.training.algorithms.dr_grpo": ("make_dr_grpo",),
    "ludic.training.algorithms.gmpo": ("make_gmpo",),
    "ludic.training.algorithms.grpo": ("make_grpo",),
    "ludic.training.algorithms.gspo": ("make_gspo",),
    "ludic.training.algorithms.opd": ("make_opd",),
    "ludic.training.algorithms.reinforce": ("make_reinforce",),
    "ludic.training.algorithms.reinforce_baseline": ("make_reinforce_baseline",),
    "ludic.training.algorithms.sapo": ("make_sapo",),
    "ludic.training.algorithms.scalerl": ("make_scalerl",),
    "ludic.training.algorithms.sft": ("make_sft",),
    "ludic.training.algorithms.spo": ("make_spo",),
    "ludic.training.batching": (
        "DynamicSampling",
        "OfflineBatchSource",
        "RolloutBatchSource",
        "SamplingAhead",
    ),
    "ludic.training.config": ("CheckpointConfig", "TrainerConfig"),
    "ludic.training.credit_assignment.returns": (
        "ConstantCredit",
        "EpisodicReturn",
        "GroupNormalizedReturn",
        "HybridNormalizedReturn",
        "MonteCarloReturn",
        "PerStepReward",
    ),
    "ludic.training.loss": (
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
    "ludic.training.losses.policy_ratio": ("Objective", "PolicyLoss", "PolicyRatio"),
    "ludic.training.preprocess": (
        "KLInReward",
        "chain",
        "drop_zero_variance_groups",
        "subtract_mean",
    ),
    "ludic.training.batching.scoring": (
        "BatchScorer",
        "ClientScores",
        "LocalScores",
        "ReferenceScorer",
        "RoutedScores",
        "ScoredBatchSource",
        "TeacherScorer",
        "TokenScores",
    ),
    "ludic.training.batching.self_play": ("PastPolicies", "SelfPlay"),
    "ludic.training.batching.task_sampling": ("UncertainTasks",),
    "ludic.training.trainer": ("Trainer",),
    "ludic.training.types": (
        "BatchSource",
        "CreditAssigner",
        "Loss",
        "LossBatch",
        "LossStats",
        "PreprocessFn",
        "Stat",
        "Stateful",
        "TokenLogProbs",
        "WorksAhead",
    ),
    "ludic.training.credit_assignment.value_tracker": (
        "BetaTracker",
        "DriftForgetting",
        "TrackedAdvantage",
    ),
    "ludic.types": ("RolloutStepKey",),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_WHERE)


__getattr__ = late_names(__name__, _WHERE)


def __dir__() -> list[str]:
    return __all__
