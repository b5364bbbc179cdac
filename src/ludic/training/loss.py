"""All losses by name. Each is defined in the file of the algorithm that introduced it."""

from ludic.training.algorithms.cispo import CISPOLoss as CISPOLoss
from ludic.training.algorithms.gmpo import GMPOLoss as GMPOLoss
from ludic.training.algorithms.grpo import TokenClippedSurrogateLoss as TokenClippedSurrogateLoss
from ludic.training.algorithms.gspo import (
    SequenceClippedSurrogateLoss as SequenceClippedSurrogateLoss,
)
from ludic.training.algorithms.opd import OnPolicyDistillationLoss as OnPolicyDistillationLoss
from ludic.training.algorithms.reinforce import ReinforceLoss as ReinforceLoss
from ludic.training.algorithms.reinforce_baseline import (
    ReinforceBaselineLoss as ReinforceBaselineLoss,
)
from ludic.training.algorithms.sapo import SAPOLoss as SAPOLoss
from ludic.training.algorithms.sft import (
    MaskedCausalLMCrossEntropyLoss as MaskedCausalLMCrossEntropyLoss,
)
from ludic.training.losses.aggregation import Aggregation as Aggregation
from ludic.training.losses.aggregation import Constant as Constant
from ludic.training.losses.aggregation import GroupMean as GroupMean
from ludic.training.losses.aggregation import SequenceMean as SequenceMean
from ludic.training.losses.aggregation import TokenMean as TokenMean
from ludic.training.losses.composite import CompositeLoss as CompositeLoss
from ludic.training.losses.composite import EntropyBonus as EntropyBonus
from ludic.training.losses.composite import TokenKLLoss as TokenKLLoss
from ludic.training.losses.corrections import CorrectedLoss as CorrectedLoss
from ludic.training.losses.corrections import MaskedImportance as MaskedImportance
from ludic.training.losses.corrections import TruncatedImportance as TruncatedImportance
from ludic.training.types import Loss as Loss
from ludic.training.types import LossBatch as LossBatch
from ludic.training.types import LossStats as LossStats
from ludic.training.types import Stat as Stat
from ludic.training.types import TokenLogProbs as TokenLogProbs

GSPOLoss = SequenceClippedSurrogateLoss
