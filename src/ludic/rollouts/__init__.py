"""Rollouts: what to run, how to run it, where to keep it, and how to run it again."""

from ludic.inference.sampling import InferenceSpec
from ludic.rollouts.curricula import Curriculum, FixedMix, Stage, Stages, TargetSolveRate
from ludic.rollouts.divergence import Divergence
from ludic.rollouts.engine import LostMemberPolicy, RolloutEngine
from ludic.rollouts.lines import CutFileWarning
from ludic.rollouts.processes import WorkerPool
from ludic.rollouts.progress import Budget, Progress
from ludic.rollouts.replaying import ReplayReport, replay
from ludic.rollouts.requests import (
    GRPORequestStrategy,
    IdentityStrategy,
    RequestStrategy,
    RolloutRequest,
)
from ludic.rollouts.storage import RolloutWriter, read_rollouts
from ludic.rollouts.token_log import TokenLog, TrainedTokens, read_token_log
from ludic.types import EnvSpec, ProtocolSpec

__all__ = [
    "Budget",
    "Curriculum",
    "CutFileWarning",
    "Divergence",
    "EnvSpec",
    "FixedMix",
    "GRPORequestStrategy",
    "IdentityStrategy",
    "InferenceSpec",
    "LostMemberPolicy",
    "Progress",
    "ProtocolSpec",
    "ReplayReport",
    "RequestStrategy",
    "RolloutEngine",
    "RolloutRequest",
    "RolloutWriter",
    "Stage",
    "Stages",
    "TargetSolveRate",
    "TokenLog",
    "TrainedTokens",
    "WorkerPool",
    "read_rollouts",
    "read_token_log",
    "replay",
]
