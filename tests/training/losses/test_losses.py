"""Each loss against its float64 reference: values and gradients, on random macro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.errors import BatchError, ConfigError, NotTrainableError
from ludic.saw.items import BatchCounts
from ludic.training import (
    CISPOLoss,
    CompositeLoss,
    Constant,
    EntropyBonus,
    GMPOLoss,
    GroupMean,
    MaskedCausalLMCrossEntropyLoss,
    OnPolicyDistillationLoss,
    ReinforceBaselineLoss,
    ReinforceLoss,
    SAPOLoss,
    SequenceClippedSurrogateLoss,
    SequenceMean,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    TokenMean,
)
from ludic.training.losses.aggregation import Aggregation, token_mean
from ludic.training.losses.composite import with_entropy, with_kl
from ludic.training.losses.policy_ratio import check_bounds, check_clip
from ludic.training.types import Loss, TokenLogProbs
from tests.oracles import objectives
from tests.oracles.tokens import Token, loss_inputs, token_lists

AGGREGATIONS: list[tuple[Aggregation, str]] = [
    (TokenMean(), "token_mean"),
    (SequenceMean("turn"), "turn_mean"),
    (SequenceMean("rollout"), "rollout_mean"),
    (GroupMean(), "group_mean"),
    (Constant(7.0), "constant"),
]


@dataclass(frozen=True)
class Case:
    """A loss for any aggregation, and the reference of its objective."""

    make: Callable[[Aggregation], Loss]
    terms: Callable[[Sequence[Token]], objectives.Terms]


CASES = {
    "reinforce": Case(lambda a: ReinforceLoss(aggregation=a), objectives.reinforce),
    "reinforce_baseline": Case(
        lambda a: ReinforceBaselineLoss(aggregation=a), objectives.reinforce
    ),
    "reinforce_capped": Case(
        lambda a: ReinforceLoss(cap=1.3, aggregation=a), lambda t: objectives.reinforce(t, cap=1.3)
    ),
    "grpo": Case(
        lambda a: TokenClippedSurrogateLoss(aggregation=a),
        lambda t: objectives.clipped(t, 0.8, 1.2),
    ),
    "gspo": Case(
        lambda a: SequenceClippedSurrogateLoss(aggregation=a),
        lambda t: objectives.gspo(t, 1 - 3e-4, 1 + 4e-4),
    ),
    "gspo_wide": Case(
        lambda a: SequenceClippedSurrogateLoss(clip=(0.7, 1.3), unit="rollout", aggregation=a),
        lambda t: objectives.gspo(t, 0.7, 1.3, "rollout"),
    ),
    "cispo": Case(
        lambda a: CISPOLoss(cap=1.5, floor=0.6, aggregation=a),
        lambda t: objectives.cispo(t, 1.5, 0.6),
    ),
    "cispo_default": Case(lambda a: CISPOLoss(aggregation=a), objectives.cispo),
    "sapo": Case(lambda a: SAPOLoss(aggregation=a), objectives.sapo),
    "gmpo": Case(lambda a: GMPOLoss(aggregation=a), objectives.gmpo),
    "gmpo_rollout": Case(
        lambda a: GMPOLoss(unit="rollout", aggregation=a),
        lambda t: objectives.gmpo(t, unit="rollout"),
    ),
    "sft": Case(lambda a: MaskedCausalLMCrossEntropyLoss(aggregation=a), objectives.sft),
    "opd": Case(
        lambda a: OnPolicyDistillationLoss(reward_coeff=0.7, aggregation=a),
        lambda t: objectives.opd(t, 0.7),
    ),
    "opd_turn": Case(
        lambda a: OnPolicyDistillationLoss(level="turn", aggregation=a),
        lambda t: objectives.opd(t, level="turn"),
    ),
    "k2": Case(
        lambda a: TokenKLLoss(estimator="k2", aggregation=a), lambda t: objectives.minus_kl(t, "k2")
    ),
    "k3": Case(
        lambda a: TokenKLLoss(estimator="k3", aggregation=a), lambda t: objectives.minus_kl(t, "k3")
    ),
    "k3_plain": Case(
        lambda a: TokenKLLoss(importance=False, aggregation=a),
        lambda t: objectives.minus_kl(t, "k3", importance=False),
    ),
}


def value_and_gradient(
    loss: Loss, tokens: Sequence[Token], members: Sequence[int] | None = None
) -> tuple[float, list[float]]:
    policy, batch = loss_inputs(tokens, members)
    value, _ = loss.compute(policy, batch)
    (gradient,) = torch.autograd.grad(value, policy.logprobs)
    return value.item(), gradient.tolist()


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25)
@given(tokens=token_lists(), aggregation=st.sampled_from(AGGREGATIONS))
def test_a_loss_has_the_value_and_gradient_of_its_reference(
    name: str, tokens: list[Token], aggregation: tuple[Aggregation, str]
) -> None:
    case, (how, oracle) = CASES[name], aggregation
    value, gradient = value_and_gradient(case.make(how), tokens)
    expected, slopes = objectives.loss_and_gradient(case.terms(tokens), tokens, oracle, length=7.0)
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-11)
    assert gradient == pytest.approx(slopes, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=30)
@given(
    tokens=token_lists(),
    aggregation=st.sampled_from(AGGREGATIONS),
    data=st.data(),
)
def test_micro_batches_add_up_to_the_macro_batch_however_it_is_split_and_ordered(
    name: str, tokens: list[Token], aggregation: tuple[Aggregation, str], data: st.DataObject
) -> None:
    loss = CASES[name].make(aggregation[0])
    value, gradient = value_and_gradient(loss, tokens)
    order = data.draw(st.permutations(range(len(tokens))))
    # The tokens that the loss must see together get one bin.
    units = [i if loss.scope == "token" else getattr(t, loss.scope) for i, t in enumerate(tokens)]
    bins = {unit: data.draw(st.integers(0, 2)) for unit in sorted(set(units))}
    total, found = 0.0, [math.nan] * len(tokens)
    for part in range(3):
        members = [i for i in order if bins[units[i]] == part]
        if not members:
            continue
        share, slopes = value_and_gradient(loss, tokens, members)
        total += share
        for i, slope in zip(members, slopes, strict=True):
            found[i] = slope
    assert total == pytest.approx(value, rel=1e-9, abs=1e-11)
    assert found == pytest.approx(gradient, rel=1e-9, abs=1e-11)


WEIGHTED = [name for name in CASES if not name.startswith(("k", "opd"))]


@pytest.mark.parametrize("name", WEIGHTED)
@given(tokens=token_lists(), aggregation=st.sampled_from(AGGREGATIONS))
@settings(max_examples=10)
def test_zero_weight_gives_zero_gradient(
    name: str, tokens: list[Token], aggregation: tuple[Aggregation, str]
) -> None:
    still = [replace(token, weight=0.0) for token in tokens]
    value, gradient = value_and_gradient(CASES[name].make(aggregation[0]), still)
    assert value == 0
    assert gradient == [0.0] * len(tokens)


@pytest.mark.parametrize("name", ["sft", "grpo", "gspo_wide", "sapo", "gmpo", "k2", "k3_plain"])
@given(tokens=token_lists(drift=0.5))
@settings(max_examples=10)
def test_gradients_agree_with_finite_differences_where_nothing_is_detached(
    name: str, tokens: list[Token]
) -> None:
    importance_free = {
        "k2": TokenKLLoss(estimator="k2", importance=False),
    }
    loss = importance_free.get(name) or CASES[name].make(TokenMean())
    policy, batch = loss_inputs(_away_from_kinks(tokens))

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        return loss.compute(replace(policy, logprobs=logprobs), batch)[0]

    assert torch.autograd.gradcheck(value, (policy.logprobs,), eps=1e-7, atol=1e-5)


def _away_from_kinks(tokens: list[Token]) -> list[Token]:
    """Finite differences are wrong across a clip's corner: moves such tokens off it."""
    moved = []
    for token in tokens:
        log_ratio = token.logp - token.behavior
        near = any(
            abs(log_ratio - kink) < 1e-3 for kink in (math.log(0.8), math.log(1.2), -0.4, 0.4)
        )
        moved.append(replace(token, behavior=token.behavior + 0.01) if near else token)
    return moved


def on_policy(tokens: Sequence[Token]) -> list[Token]:
    return [replace(t, behavior=t.logp) for t in tokens]


@given(tokens=token_lists())
@settings(max_examples=25)
def test_the_first_step_on_policy_has_the_gradient_that_the_formula_gives_on_paper(
    tokens: list[Token],
) -> None:
    # At logp = logp_behaviour every ratio is 1, so no clip is active, and d rho / d logp = rho = 1.
    #   REINFORCE  d/dlogp [sg(1)·A·logp]         = A
    #   CISPO      d/dlogp [sg(min(1, 5))·A·logp] = A
    #   GRPO       d/dlogp [rho·A]                = A
    #   SAPO       (4/τ)·σ'(0)·τ·rho·A = 4·¼·A    = A
    # each times the token's coefficient, 1/(n_i·N) under sequence_mean and 1/T under token_mean.
    #   GSPO, GMPO  d/dlogp_j Σ_i c_i·s·A = (1/n)·s·A·Σ_i c_i, with s = 1 and Σ_i c_i = 1/N over the
    #   turn's n tokens: A/(n·N), the same as GRPO's.
    tokens = on_policy(tokens)
    turns = len({t.turn for t in tokens})
    length = {t.turn: sum(u.turn == t.turn for u in tokens) for t in tokens}
    by_sequence = [-t.weight / (length[t.turn] * turns) for t in tokens]
    by_token = [-t.weight / len(tokens) for t in tokens]
    expected: list[tuple[Loss, list[float]]] = [
        (ReinforceLoss(), by_token),
        (CISPOLoss(), by_token),
        (TokenClippedSurrogateLoss(), by_sequence),
        (SAPOLoss(), by_sequence),
        (SequenceClippedSurrogateLoss(), by_sequence),
        (GMPOLoss(), by_sequence),
    ]
    for loss, slopes in expected:
        _, gradient = value_and_gradient(loss, tokens)
        assert gradient == pytest.approx(slopes, rel=1e-12, abs=1e-15), type(loss).__name__


@given(tokens=token_lists())
@settings(max_examples=10)
def test_a_composite_loss_is_the_weighted_sum_of_its_terms(tokens: list[Token]) -> None:
    surrogate, kl = TokenClippedSurrogateLoss(), TokenKLLoss(estimator="k2")
    whole = CompositeLoss((1.0, surrogate), (0.3, kl), (0.1, EntropyBonus()))
    policy, batch = loss_inputs(tokens)
    value, stats = whole.compute(policy, batch)
    entropy = sum(t.entropy for t in tokens) / len(tokens)
    parts = surrogate.compute(policy, batch)[0] + 0.3 * kl.compute(policy, batch)[0]
    assert value.item() == pytest.approx(parts.item() - 0.1 * entropy)
    assert stats["loss_EntropyBonus"].total.item() == pytest.approx(-entropy)
    assert "clip_fraction" in stats
    assert stats["loss_TokenKLLoss"].total.item() == pytest.approx(
        kl.compute(policy, batch)[0].item()
    )
    assert policy.entropy is not None
    (slope,) = torch.autograd.grad(value, policy.entropy)
    assert slope.tolist() == pytest.approx([-0.1 / len(tokens)] * len(tokens))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@given(tokens=token_lists())
@settings(max_examples=10)
def test_the_kl_that_is_logged_is_that_of_the_policy_to_the_reference(
    estimator: Literal["k2", "k3"], tokens: list[Token]
) -> None:
    _, stats = TokenKLLoss(estimator=estimator).compute(*loss_inputs(tokens))
    k1 = [t.logp - t.reference for t in tokens]
    own = {"k2": lambda k: k * k / 2, "k3": lambda k: math.exp(-k) - 1 + k}[estimator]
    for name, values in (("", k1), (f"_{estimator}", [*map(own, k1)])):
        stat = stats[f"kl_reference{name}"]
        mean = (stat.total / stat.weight).item()
        assert mean == pytest.approx(sum(values) / len(tokens), rel=1e-6, abs=1e-9)


@given(tokens=token_lists(), coefficient=st.sampled_from([-3.0, 0.0, 0.5, 2.5, 40.0]))
@settings(max_examples=20)
def test_a_coefficient_of_any_size_scales_its_term(tokens: list[Token], coefficient: float) -> None:
    surrogate = TokenClippedSurrogateLoss()
    policy, batch = loss_inputs(tokens)
    share = surrogate.compute(policy, batch)[0].item()
    for whole in (
        CompositeLoss((coefficient, surrogate)),
        with_entropy(CompositeLoss((coefficient, surrogate)), 1e-12, token_mean),
    ):
        value, stats = whole.compute(policy, batch)
        assert value.item() == pytest.approx(coefficient * share, abs=1e-9)
        # The term's own share is logged, whatever its coefficient.
        assert stats["loss_TokenClippedSurrogateLoss"].total.item() == pytest.approx(share)
    whole = with_entropy(surrogate, 7.0, token_mean)
    entropy = sum(t.entropy for t in tokens) / len(tokens)
    assert whole.compute(policy, batch)[0].item() == pytest.approx(share - 7 * entropy)


def test_a_composite_asks_for_what_any_of_its_terms_needs() -> None:
    whole = CompositeLoss((1.0, GMPOLoss(unit="rollout")), (0.1, EntropyBonus()))
    assert not whole.needs_logits
    assert whole.scope == "rollout"
    assert whole.preprocess is None
    with_baseline = CompositeLoss((1.0, ReinforceBaselineLoss()), (0.1, EntropyBonus()))
    assert with_baseline.preprocess is not None


def exact_kls(logits: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients by the logits of KL(π‖ref) and of KL(ref‖π), summed over the vocabulary."""
    forward = logits.clone().requires_grad_()
    logp = forward.log_softmax(0)
    of_policy_kl = (logp.exp() * (logp - reference)).sum()
    (of_policy,) = torch.autograd.grad(of_policy_kl, forward, retain_graph=True)
    (of_reference,) = torch.autograd.grad((reference.exp() * (reference - logp)).sum(), forward)
    return of_policy, of_reference


@pytest.mark.parametrize(("estimator", "direction"), [("k2", 0), ("k3", 1)])
@pytest.mark.parametrize("stale", [False, True])
def test_the_expected_gradient_of_a_kl_loss_is_that_of_the_kl_it_names(
    estimator: str, direction: int, stale: bool
) -> None:
    # One state, a vocabulary of five: the expectation over the behaviour policy is a finite sum.
    generator = torch.Generator().manual_seed(3)
    logits, behavior, reference = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    reference = reference.log_softmax(0)
    behavior = (behavior if stale else logits).log_softmax(0)
    expected = torch.zeros(5, dtype=torch.float64)
    for token in range(5):
        variable = logits.clone().requires_grad_()
        one = Token(
            logp=0,
            behavior=behavior[token].item(),
            weight=0,
            turn=0,
            rollout=0,
            group=0,
            reference=reference[token].item(),
        )
        policy, batch = loss_inputs([one])
        policy = replace(policy, logprobs=variable.log_softmax(0)[token : token + 1])
        value, _ = TokenKLLoss(estimator=estimator).compute(policy, batch)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(value, variable)
        expected += behavior[token].exp() * gradient
    exact = exact_kls(logits, reference)[direction]
    torch.testing.assert_close(expected, exact, rtol=1e-10, atol=1e-12)


TOKENS = [
    Token(logp=-1.0, behavior=-1.5, weight=1.0, turn=0, rollout=0, group=0),
    Token(logp=-2.0, behavior=-1.0, weight=-1.0, turn=1, rollout=1, group=0),
]


def test_statistics_are_those_of_the_ratios_before_the_clip() -> None:
    policy, batch = loss_inputs(TOKENS)
    _, stats = TokenClippedSurrogateLoss().compute(policy, batch)
    ratios = [math.exp(0.5), math.exp(-1.0)]
    mean = stats["ratio_mean"]
    assert mean.total.item() / mean.weight.item() == pytest.approx(sum(ratios) / 2)
    assert stats["ratio_max"].total.item() == pytest.approx(ratios[0])
    assert stats["ratio_min"].total.item() == pytest.approx(ratios[1])
    assert stats["clip_fraction"].total.item() == 2
    kl = stats["kl_behavior"].total.item()
    assert kl == pytest.approx(sum(r - 1 - math.log(r) for r in ratios))


@pytest.mark.parametrize(
    "loss",
    [
        ReinforceLoss(),
        TokenClippedSurrogateLoss(),
        SequenceClippedSurrogateLoss(),
        CISPOLoss(),
        SAPOLoss(),
        GMPOLoss(),
        TokenKLLoss(),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_loss_with_ratios_says_when_the_samplers_log_probs_are_missing(loss: Loss) -> None:
    policy, batch = loss_inputs(TOKENS)
    with pytest.raises(NotTrainableError, match="behaviour log-probs"):
        loss.compute(policy, replace(batch, behavior_logprobs=None))


def test_kl_and_distillation_say_whose_log_probs_are_missing() -> None:
    policy, batch = loss_inputs(TOKENS)
    with pytest.raises(
        NotTrainableError,
        match=r"reference's .*, \[ReferenceScorer\(",
    ):
        TokenKLLoss().compute(policy, replace(batch, reference_logprobs=None))
    with pytest.raises(NotTrainableError, match="teacher's log-probs"):
        OnPolicyDistillationLoss().compute(policy, replace(batch, teacher_logprobs=None))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(bad: float) -> None:
    policy, batch = loss_inputs([TOKENS[0], replace(TOKENS[1], weight=bad)])
    with pytest.raises(BatchError, match=f"action token 1 is {bad}"):
        TokenClippedSurrogateLoss().compute(policy, batch)


def test_log_probs_and_weights_of_different_lengths_are_refused() -> None:
    policy, batch = loss_inputs(TOKENS)
    with pytest.raises(BatchError, match="1 log-probs for 2 weights"):
        ReinforceLoss().compute(TokenLogProbs(policy.logprobs[:1]), batch)


@pytest.mark.parametrize("loss", [SequenceClippedSurrogateLoss(), GMPOLoss()])
def test_a_turn_that_is_split_over_micro_batches_is_refused_by_losses_over_turns(
    loss: Loss,
) -> None:
    tokens = [TOKENS[0], replace(TOKENS[1], turn=0, rollout=0)]
    policy, batch = loss_inputs(tokens, [0])
    with pytest.raises(BatchError, match="a turn is split"):
        loss.compute(policy, batch)


def test_a_ratio_that_overflows_does_not_turn_a_zero_weight_into_nan() -> None:
    far = Token(logp=0.0, behavior=-500.0, weight=0.0, turn=0, rollout=0, group=0)
    for loss in (ReinforceLoss(), TokenClippedSurrogateLoss(), SAPOLoss(), GMPOLoss()):
        value, gradient = value_and_gradient(loss, [far])
        assert value == 0
        assert gradient == [0.0]


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="no gradient as a loss"):
        TokenKLLoss(estimator="k1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bounds of the ratio"):
        TokenClippedSurrogateLoss(clip=(0.2, 0.2))
    with pytest.raises(ConfigError):
        CISPOLoss(cap=1.0, floor=2.0)
    with pytest.raises(ConfigError):
        GMPOLoss(clip=0.0)
    with pytest.raises(ConfigError):
        SAPOLoss(tau_neg=0.0)
    with pytest.raises(ConfigError):
        Constant(0)
    with pytest.raises(ConfigError):
        SequenceMean("row")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        CompositeLoss()


def test_bounds_may_touch_and_may_not_cross() -> None:
    for low, high in ((None, 0.1), (0.0, 0.1), (0.5, 0.5), (0.5, math.inf)):
        check_bounds(low, high)
    for low, high in ((None, 0.0), (0.0, 0.0), (-0.1, 1.0), (0.6, 0.5), (None, math.nan)):
        with pytest.raises(ConfigError, match="bounds of a ratio"):
            check_bounds(low, high)
    for clip in ((0.0, 1.0), (1.0, 1.0), (1.0, 9.0)):
        check_clip(clip)
    for clip in ((-0.1, 1.2), (1.1, 1.2), (0.8, 0.9)):
        with pytest.raises(ConfigError, match="bounds of the ratio"):
            check_clip(clip)


def test_a_term_without_a_coefficient_is_left_out_and_a_negative_one_refused() -> None:
    loss, by_turn = TokenClippedSurrogateLoss(), SequenceMean()
    for add in (with_kl, with_entropy):
        assert add(loss, 0.0, by_turn) is loss
        for bad in (-0.1, math.nan):
            with pytest.raises(ConfigError, match="must be >= 0"):
                add(loss, bad, by_turn)
    kl = with_kl(loss, 0.2, by_turn)
    assert isinstance(kl, CompositeLoss)
    assert kl.terms == ((1.0, loss), (0.2, TokenKLLoss(estimator="k3", aggregation=by_turn)))
    both = with_entropy(kl, 0.5, by_turn)
    assert isinstance(both, CompositeLoss)
    assert both.terms == (*kl.terms, (0.5, EntropyBonus(aggregation=by_turn)))
    alone = with_entropy(loss, 0.5, by_turn)
    assert isinstance(alone, CompositeLoss)
    assert alone.terms == ((1.0, loss), (0.5, EntropyBonus(aggregation=by_turn)))
    assert alone.parts == (loss, EntropyBonus(aggregation=by_turn))


@pytest.mark.parametrize("aggregation", [a for a, _ in AGGREGATIONS[:4]], ids=repr)
def test_one_token_alone_counts_as_one(aggregation: Aggregation) -> None:
    _, batch = loss_inputs(TOKENS[:1])
    assert aggregation.coefficients(batch).tolist() == [1.0]
    empty = replace(batch, counts=BatchCounts(0, 0, 0, 0))
    assert aggregation.coefficients(empty).tolist() == [1.0]


def test_an_entropy_bonus_without_entropies_is_refused() -> None:
    policy, batch = loss_inputs(TOKENS)
    with pytest.raises(BatchError, match="entropies"):
        EntropyBonus().compute(replace(policy, entropy=None), batch)


@pytest.mark.parametrize("k1", [-60.0, -21.0, -19.0, -1.0, 0.5, 30.0])
def test_k3_pulls_towards_the_reference_however_far_away_it_is(k1: float) -> None:
    one = Token(logp=-70.0, behavior=-70.0, weight=0, turn=0, rollout=0, group=0)
    policy, batch = loss_inputs([replace(one, reference=-70.0 - k1)])
    logprobs = policy.logprobs.detach().float().requires_grad_()
    value, _ = TokenKLLoss().compute(replace(policy, logprobs=logprobs), batch)
    (slope,) = torch.autograd.grad(value, logprobs)
    assert math.isfinite(value.item())
    assert slope.item() * k1 > 0
    exact = 1 - math.exp(-k1)
    assert slope.item() == pytest.approx(max(exact, 1 - math.exp(20)), rel=1e-4)


def test_distilling_whole_turns_does_not_favour_short_ones() -> None:
    # One token that the teacher finds unlikely, against eight that it nearly agrees with.
    one = Token(logp=-1.0, behavior=-1.0, weight=0, turn=0, rollout=0, group=0, teacher=-4.0)
    near = [replace(one, turn=1, rollout=1, teacher=-1.5) for _ in range(8)]
    policy, batch = loss_inputs([one, *near])
    loss = OnPolicyDistillationLoss(level="turn")
    (slope,) = torch.autograd.grad(loss.compute(policy, batch)[0], policy.logprobs)
    short, *long = (-slope * 9).tolist()
    assert short == pytest.approx(-3.0)
    assert long == pytest.approx([-0.5] * 8)
