"""Rollouts: what to run, how to run it, where to keep it, and how to run it again."""

from ludic.inference.sampling import InferenceSpec
from ludic.rollouts.curricula import Curriculum, FixedMix, Stage, Stages, TargetSolveRate
from ludic.rollouts.engine import LostMemberPolicy, RolloutEngine
from ludic.rollouts.progress import Budget, Progress
from ludic.rollouts.replaying import Divergence, ReplayReport, replay
from ludic.rollouts.requests import RolloutRequest
from ludic.rollouts.storage import CutFileWarning, RolloutReader, RolloutWriter, read_rollouts
from ludic.rollouts.strategies import GRPORequestStrategy, IdentityStrategy, RequestStrategy
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
    "RolloutReader",
    "RolloutRequest",
    "RolloutWriter",
    "Stage",
    "Stages",
    "TargetSolveRate",
    "read_rollouts",
    "replay",
]
