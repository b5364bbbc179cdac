"""Importance corrections against plain references, alone and around any loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.errors import ConfigError, NotTrainableError
from ludic.training import (
    CISPOLoss,
    CompositeLoss,
    Constant,
    CorrectedLoss,
    EntropyBonus,
    MaskedImportance,
    ReinforceBaselineLoss,
    ReinforceLoss,
    RLAlgorithm,
    SequenceMean,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    TruncatedImportance,
)
from ludic.training.credit_assignment.returns import MonteCarloReturn
from tests.oracles import corrections as oracle
from tests.oracles import objectives
from tests.oracles.tokens import Token, loss_inputs, token_lists

levels = st.sampled_from(["token", "turn", "rollout"])
means = st.sampled_from(["product", "geometric"])


def around_proximal(tokens: list[Token]) -> list[Token]:
    """What a loss against the proximal policy sees in the place of the behaviour."""
    return [replace(t, behavior=t.proximal) for t in tokens]


@given(tokens=token_lists(drift=0.6), level=levels, mean=means, keep=st.booleans())
@settings(max_examples=25)
def test_a_corrected_loss_is_the_loss_against_proximal_times_the_factors(
    tokens: list[Token], level: Any, mean: Any, keep: bool
) -> None:
    loss = CorrectedLoss(
        TokenClippedSurrogateLoss(),
        TruncatedImportance(1.2, level=level, mean=mean),
        MaskedImportance(0.8, 1.4, level=level, mean=mean, keep_ratio=keep),
    )
    policy, batch = loss_inputs(tokens)
    value, _ = loss.compute(policy, batch)
    (gradient,) = torch.autograd.grad(value, policy.logprobs)

    terms = objectives.clipped(around_proximal(tokens), 0.8, 1.2)
    scaled: objectives.Terms = []
    for i, (term, slopes) in enumerate(terms):
        r = oracle.ratio(tokens, i, level, mean)
        factor = oracle.truncated(r, 1.2) * oracle.masked(r, 0.8, 1.4, keep)
        scaled.append((factor * term, {j: factor * slope for j, slope in slopes.items()}))
    expected, by_hand = objectives.loss_and_gradient(scaled, tokens, "turn_mean")
    assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-11)
    assert gradient.tolist() == pytest.approx(by_hand, rel=1e-9, abs=1e-11)


@given(tokens=token_lists(drift=0.6))
@settings(max_examples=30)
def test_a_full_correction_is_plain_importance_sampling(tokens: list[Token]) -> None:
    # (proximal/behaviour) · (current/proximal) = current/behaviour: REINFORCE's own ratio.
    policy, batch = loss_inputs(tokens)
    plain, _ = ReinforceLoss().compute(policy, batch)
    corrected, _ = CorrectedLoss(ReinforceLoss(), TruncatedImportance(1e6)).compute(policy, batch)
    assert corrected.item() == pytest.approx(plain.item(), rel=1e-9, abs=1e-12)


@given(tokens=token_lists(drift=0.6))
@settings(max_examples=20)
def test_without_proximal_log_probs_the_current_ones_stand_for_them(tokens: list[Token]) -> None:
    policy, batch = loss_inputs([replace(t, proximal=t.logp) for t in tokens])
    loss = CorrectedLoss(CISPOLoss(), TruncatedImportance(1.1))
    recorded, _ = loss.compute(policy, batch)
    assumed, _ = loss.compute(policy, replace(batch, proximal_logprobs=None))
    assert assumed.item() == pytest.approx(recorded.item(), rel=1e-12)
    (slope,) = torch.autograd.grad(assumed, policy.logprobs)
    (expected,) = torch.autograd.grad(recorded, policy.logprobs)
    torch.testing.assert_close(slope, expected)


@given(tokens=token_lists(drift=0.6), level=levels)
@settings(max_examples=30)
def test_statistics_are_from_before_the_truncation(tokens: list[Token], level: Any) -> None:
    loss = CorrectedLoss(ReinforceLoss(), TruncatedImportance(1.1, level=level))
    policy, batch = loss_inputs(tokens)
    _, stats = loss.compute(policy, batch)
    ratios = [oracle.ratio(tokens, i, level, "product") for i in range(len(tokens))]
    mean = stats[f"correction_{level}_ratio_mean"]
    cut = stats[f"correction_{level}_truncated_fraction"]
    assert mean.total.item() / mean.weight.item() == pytest.approx(sum(ratios) / len(ratios))
    assert stats[f"correction_{level}_ratio_max"].total.item() == pytest.approx(max(ratios))
    assert cut.total.item() == sum(r > 1.1 for r in ratios)


@given(tokens=token_lists(drift=0.6))
@settings(max_examples=20)
def test_a_kl_term_is_corrected_too_and_an_entropy_bonus_is_not(tokens: list[Token]) -> None:
    policy, batch = loss_inputs(tokens)
    correction = TruncatedImportance(1.1)
    inner = CompositeLoss((1.0, TokenKLLoss(estimator="k2")), (0.5, EntropyBonus()))
    value, _ = CorrectedLoss(inner, correction).compute(policy, batch)
    kl, _ = CorrectedLoss(TokenKLLoss(estimator="k2"), correction).compute(policy, batch)
    bonus, _ = EntropyBonus().compute(policy, batch)
    assert value.item() == pytest.approx((kl + 0.5 * bonus).item())


def test_masked_tokens_still_count_in_the_normaliser() -> None:
    tokens = [
        Token(-1.0, -1.0, 1.0, turn=0, rollout=0, group=0, proximal=-1.0),
        Token(-1.0, -9.0, 1.0, turn=1, rollout=1, group=0, proximal=-1.0),
    ]
    policy, batch = loss_inputs(tokens)
    reinforce = ReinforceLoss(aggregation=Constant(1.0))
    value, stats = CorrectedLoss(reinforce, MaskedImportance(0.5, 2.0)).compute(policy, batch)
    (gradient,) = torch.autograd.grad(value, policy.logprobs)
    assert gradient.tolist() == [-0.5, 0.0]
    assert stats["correction_token_masked_fraction"].total.item() == 1


def factors(correction: Any, *ratios: float) -> list[float]:
    tokens = [Token(-1.0, -1.0, 1.0, n, n, 0) for n in range(len(ratios))]
    _, batch = loss_inputs(tokens)
    found, _ = correction.factors(torch.tensor(ratios, dtype=torch.float64).log(), batch)
    return [round(value, 12) for value in found.tolist()]


def test_bounds_of_a_correction_belong_to_it() -> None:
    for bounds in ((1.0, 2.0), (0.5, 1.0)):
        assert factors(MaskedImportance(*bounds), 1.0) == [1.0]
    assert factors(MaskedImportance(keep_ratio=False), 0.4, 0.6, 1.9, 2.1) == [0.0, 1.0, 1.0, 0.0]
    assert factors(MaskedImportance(), 0.4, 0.6, 1.9, 2.1) == [0.0, 0.6, 1.9, 0.0]
    assert factors(TruncatedImportance(), 1e-3, 1.9, 2.1, 9.0) == [1e-3, 1.9, 2.0, 2.0]
    assert factors(TruncatedImportance(3.0, 0.5), 0.1, 2.5, 4.0) == [0.5, 2.5, 3.0]
    for level in ("token", "turn", "rollout"):
        _, batch = loss_inputs([Token(-1.0, -1.0, 1.0, 0, 0, 0)])
        _, stats = TruncatedImportance(level=level).factors(torch.zeros(1), batch)
        assert stats[f"correction_{level}_truncated_fraction"].total.item() == 0


def test_the_widest_scope_is_asked_for_and_a_baseline_inside_is_kept() -> None:
    turn, rollout = MaskedImportance(level="turn"), TruncatedImportance(level="rollout")
    assert CorrectedLoss(CISPOLoss(), turn).scope == "turn"
    assert CorrectedLoss(CISPOLoss(), turn, rollout).scope == "rollout"
    loss = CorrectedLoss(ReinforceBaselineLoss(), TruncatedImportance())
    assert RLAlgorithm("mine", MonteCarloReturn(), loss).preprocess is not None


def test_bad_settings_and_missing_log_probs_are_refused() -> None:
    with pytest.raises(ConfigError):
        TruncatedImportance(0.0)
    with pytest.raises(ConfigError):
        MaskedImportance(2.0, 1.0)
    with pytest.raises(ConfigError, match="at least one correction"):
        CorrectedLoss(CISPOLoss())
    inner = CompositeLoss((1.0, CorrectedLoss(CISPOLoss(), MaskedImportance())))
    with pytest.raises(ConfigError, match="give all the corrections to one"):
        CorrectedLoss(inner, TruncatedImportance())
    policy, batch = loss_inputs([Token(-1.0, -1.0, 1.0, 0, 0, 0)])
    loss = CorrectedLoss(
        TokenClippedSurrogateLoss(aggregation=SequenceMean()), TruncatedImportance()
    )
    with pytest.raises(NotTrainableError, match="behaviour log-probs"):
        loss.compute(policy, replace(batch, behavior_logprobs=None))
