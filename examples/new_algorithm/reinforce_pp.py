"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262), an algorithm that the library does not have.

The paper has no critic and no groups: every answer is compared with the whole batch. A token's
advantage is the answer's reward minus the KL to a reference from that token on,

    A_t = R − β · Σ_{i ≥ t} (logp_i − logp_ref_i)

normalised over all tokens of the batch, A ← (A − mean) / std, and the objective is PPO's clip,
min(ρA, clip(ρ, 1 − ε, 1 + ε)·A).

In Ludic that is a credit assigner (the return of each turn), two preprocesses (the KL, then the
normalisation, since both look beyond one micro-batch) and a loss. Only the normalisation is new.

Defaults: β = 0, ε = 0.2, token_mean. Differences: with several turns, R is the return from the
token's turn on; the KL is of the policy that sampled, as in the paper, where it is also the policy
at the start of the update. A run file uses it by name: see tiny.toml.
"""

import numpy as np

from ludic.saw import SAWBatch
from ludic.training import (
    KLInReward,
    MonteCarloReturn,
    RLAlgorithm,
    TokenClippedSurrogateLoss,
    register_algorithm,
    token_mean,
)
from ludic.training.preprocess import chain, rescale


def normalize_over_batch(batch: SAWBatch) -> SAWBatch:
    """Every weight minus the mean over the batch's action tokens, divided by their std."""
    parts = []
    for item in batch.items:
        weights = item.attachments.token_weights
        parts.append(np.full(item.turns[-1].end, item.weight) if weights is None else weights)
    tokens = np.concatenate(parts).astype(np.float64)
    scale = 1.0 / (float(tokens.std()) + 1e-8)
    return rescale(batch, scale, -float(tokens.mean()) * scale)


def make_reinforce_pp(
    *, kl_coeff: float = 0.0, clip: tuple[float, float] = (0.8, 1.2)
) -> RLAlgorithm:
    """REINFORCE++; `kl_coeff` (β) above 0 needs a reference."""
    charge = KLInReward(kl_coeff, horizon="rollout") if kl_coeff else None
    return RLAlgorithm(
        "reinforce_pp",
        MonteCarloReturn(gamma=1.0),
        TokenClippedSurrogateLoss(clip=clip, aggregation=token_mean),
        preprocess=chain(charge, normalize_over_batch),
    )


register_algorithm("reinforce_pp", make_reinforce_pp, description="batch-normalised returns")
