"""Supervised fine-tuning: behavioural cloning of recorded actions.

Objective per token: A·logp with A = 1, token_mean. With other weights (rewards as credit, say)
this is reward-weighted regression. Needs no behaviour log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ludic.training.algorithm import RLAlgorithm, remembered
from ludic.training.credit_assignment.returns import ConstantCredit
from ludic.training.losses.aggregation import Aggregation, token_mean
from ludic.training.losses.policy_ratio import check_batch, reduce
from ludic.training.types import LossBatch, LossStats, Scope, Stat, TokenLogProbs


@dataclass(frozen=True, kw_only=True)
class MaskedCausalLMCrossEntropyLoss:
    """The weighted negative log-likelihood of the action tokens."""

    needs_logits: ClassVar[bool] = False
    scope: ClassVar[Scope] = "token"

    aggregation: Aggregation = token_mean

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[Tensor, LossStats]:
        """The micro-batch's share of the loss, and the plain mean NLL per token."""
        check_batch(policy, batch)
        loss = reduce(batch.weights * policy.logprobs, batch, self.aggregation)
        return loss, {"nll": Stat.mean(-policy.logprobs)}


@remembered("sft")
def make_sft(*, aggregation: Aggregation = token_mean) -> RLAlgorithm:
    """Constant credit with the cross-entropy of the action tokens."""
    loss = MaskedCausalLMCrossEntropyLoss(aggregation=aggregation)
    return RLAlgorithm("sft", ConstantCredit(), loss)
