"""On-policy distillation (Agarwal et al. 2024, "GKD"; Thinking Machines 2025), with any number
of teachers (MOPD: MiMo-V2-Flash, arXiv 2601.02780).

Objective per token, on the student's own samples: sg(ρ)·A·logp with

    A = −(logp_student − logp_teacher), detached, + reward_coeff · the outcome's credit

token_mean. In expectation the first part is minus the gradient of KL(student‖teacher) at each
visited state. With `level="turn"` every token of a turn has the turn's mean gap, so that early
tokens answer for later ones, at more variance. The mean, not the sum: the KL of a whole turn falls
fastest by ending the turn after one token. Defaults: token level, no reward, no cap on ρ. With a
`group_size` the outcome's credit is GRPO's.

Departures: logp_student is the current policy's, not the sampler's, so that stale data stays
right under ρ. Each sample's teacher is chosen where it is scored. MOPD is `sequence_mean` with a
`MaskedImportance`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from ludic.errors import ConfigError
from ludic.saw.building import CreditAssigner
from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.algorithms.reinforce import ReinforceLoss
from ludic.training.credit_assignment.returns import ConstantCredit, GroupNormalizedReturn
from ludic.training.losses.aggregation import Aggregation, token_mean
from ludic.training.losses.policy_ratio import mean_over, missing_logprobs
from ludic.training.types import LossBatch, LossStats, Scope, Stat, TokenLogProbs


@dataclass(frozen=True, kw_only=True)
class OnPolicyDistillationLoss(ReinforceLoss):
    """The policy gradient of the log-prob gap to the teacher, plus the outcome's credit."""

    reward_coeff: float = 0.0
    level: Literal["token", "turn"] = "token"

    @property
    def scope(self) -> Scope:
        return self.level

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[Tensor, LossStats]:
        """The micro-batch's share of the loss; `kl_teacher` is the mean gap per token."""
        if batch.teacher_logprobs is None:
            raise missing_logprobs("teacher")
        gap = policy.logprobs.detach() - batch.teacher_logprobs
        pull = mean_over(gap, batch, "turn") if self.level == "turn" else gap
        weights = self.reward_coeff * batch.weights - pull
        loss, stats = super().compute(policy, replace(batch, weights=weights))
        return loss, {**stats, "kl_teacher": Stat.mean(gap)}


@remembered("opd")
def make_opd(
    *,
    reward_coeff: float = 0.0,
    group_size: int | None = None,
    credit_assigner: CreditAssigner | None = None,
    level: Literal["token", "turn"] = "token",
    cap: float = math.inf,
    aggregation: Aggregation = token_mean,
) -> RLAlgorithm:
    """Distillation on the student's samples; `group_size` or `credit_assigner` is for rewards."""
    if group_size is not None:
        if credit_assigner is not None:
            raise ConfigError("make_opd: give a group_size or a credit_assigner, not both")
        credit_assigner = GroupNormalizedReturn(group_size, normalize_adv=True)
    if reward_coeff and credit_assigner is None:
        raise ConfigError("make_opd: reward_coeff needs a group_size or a credit_assigner")
    loss = OnPolicyDistillationLoss(
        reward_coeff=reward_coeff, level=level, cap=cap, aggregation=aggregation
    )
    return RLAlgorithm("opd", credit_assigner or ConstantCredit(), loss)
