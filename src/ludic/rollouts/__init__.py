"""Rollouts: what to run, how to run it, where to keep it, and how to run it again."""

from ludic.inference.sampling import InferenceSpec as InferenceSpec
from ludic.rollouts.curricula import Stage as Stage
from ludic.rollouts.curricula import Stages as Stages
from ludic.rollouts.curricula import TargetSolveRate as TargetSolveRate
from ludic.rollouts.engine import Budget as Budget
from ludic.rollouts.engine import LostMemberPolicy as LostMemberPolicy
from ludic.rollouts.engine import Progress as Progress
from ludic.rollouts.engine import RolloutEngine as RolloutEngine
from ludic.rollouts.lines import CutFileWarning as CutFileWarning
from ludic.rollouts.processes import WorkerPool as WorkerPool
from ludic.rollouts.replaying import Divergence as Divergence
from ludic.rollouts.replaying import ReplayReport as ReplayReport
from ludic.rollouts.replaying import replay as replay
from ludic.rollouts.requests import Curriculum as Curriculum
from ludic.rollouts.requests import FixedMix as FixedMix
from ludic.rollouts.requests import GRPORequestStrategy as GRPORequestStrategy
from ludic.rollouts.requests import IdentityStrategy as IdentityStrategy
from ludic.rollouts.requests import RequestStrategy as RequestStrategy
from ludic.rollouts.requests import RolloutRequest as RolloutRequest
from ludic.rollouts.storage import RolloutWriter as RolloutWriter
from ludic.rollouts.storage import read_rollouts as read_rollouts
from ludic.rollouts.token_log import TokenLog as TokenLog
from ludic.rollouts.token_log import TrainedTokens as TrainedTokens
from ludic.rollouts.token_log import read_token_log as read_token_log
from ludic.types import EnvSpec as EnvSpec
from ludic.types import ProtocolSpec as ProtocolSpec
