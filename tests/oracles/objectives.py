"""Slow float64 references of the losses, from the papers' formulas, with gradients by hand.

Loops over plain numbers; no tensors, no autograd, nothing of the implementation. A term is an
objective's value at a token and its derivatives by the log-probs of the tokens it depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.oracles.tokens import Token

Term = tuple[float, dict[int, float]]
Terms = list[Term]


def sequences(tokens: Sequence[Token], unit: str) -> list[list[int]]:
    """The positions of each turn's, rollout's or group's tokens."""
    names = sorted({getattr(t, unit) for t in tokens})
    return [[i for i, t in enumerate(tokens) if getattr(t, unit) == name] for name in names]


def reinforce(tokens: Sequence[Token], cap: float = math.inf) -> Terms:
    """sg(min(rho, cap)) * A * logp."""
    terms: Terms = []
    for i, t in enumerate(tokens):
        rho = min(math.exp(t.logp - t.behavior), cap)
        terms.append((rho * t.weight * t.logp, {i: rho * t.weight}))
    return terms


def cispo(tokens: Sequence[Token], cap: float = 5.0, floor: float = 0.0) -> Terms:
    """sg(clip(rho, floor, cap)) * A * logp."""
    terms: Terms = []
    for i, t in enumerate(tokens):
        rho = max(min(math.exp(t.logp - t.behavior), cap), floor)
        terms.append((rho * t.weight * t.logp, {i: rho * t.weight}))
    return terms


def clipped(tokens: Sequence[Token], low: float, high: float) -> Terms:
    """min(rho * A, clip(rho, low, high) * A): constant where the clipped side is the smaller."""
    terms: Terms = []
    for i, t in enumerate(tokens):
        rho = math.exp(t.logp - t.behavior)
        if t.weight >= 0 and rho > high:
            terms.append((high * t.weight, {}))
        elif t.weight < 0 and rho < low:
            terms.append((low * t.weight, {}))
        else:
            terms.append((rho * t.weight, {i: rho * t.weight}))
    return terms


def gspo(tokens: Sequence[Token], low: float, high: float, unit: str = "turn") -> Terms:
    """The clip on s = (product of ratios)^(1/length), the same for all tokens of the sequence."""
    terms: Terms = [(0.0, {})] * len(tokens)
    for members in sequences(tokens, unit):
        product = 1.0
        for i in members:
            product *= math.exp(tokens[i].logp) / math.exp(tokens[i].behavior)
        s = product ** (1 / len(members))
        for i in members:
            weight = tokens[i].weight
            if weight >= 0 and s > high:
                terms[i] = (high * weight, {})
            elif weight < 0 and s < low:
                terms[i] = (low * weight, {})
            else:
                # d s / d logp_j = s / length for each token j of the sequence
                terms[i] = (s * weight, {j: s * weight / len(members) for j in members})
    return terms


def sapo(tokens: Sequence[Token], tau_pos: float = 1.0, tau_neg: float = 1.05) -> Terms:
    """(4 / tau) * sigmoid(tau * (rho - 1)) * A."""
    terms: Terms = []
    for i, t in enumerate(tokens):
        tau = tau_pos if t.weight > 0 else tau_neg
        rho = math.exp(t.logp - t.behavior)
        gate = 1 / (1 + math.exp(-tau * (rho - 1)))
        value = 4 / tau * gate * t.weight
        # d/d logp: (4/tau) * gate * (1 - gate) * tau * rho * A
        terms.append((value, {i: 4 * gate * (1 - gate) * rho * t.weight}))
    return terms


def gmpo(tokens: Sequence[Token], clip: float = 0.4, unit: str = "turn") -> Terms:
    """A * (product of clipped ratios)^(1/length)."""
    terms: Terms = [(0.0, {})] * len(tokens)
    for members in sequences(tokens, unit):
        total, free = 0.0, []
        for i in members:
            log_ratio = tokens[i].logp - tokens[i].behavior
            if tokens[i].weight > 0 and log_ratio > clip:
                total += clip
            elif tokens[i].weight <= 0 and log_ratio < -clip:
                total += -clip
            else:
                total += log_ratio
                free.append(i)
        geometric = math.exp(total / len(members))
        for i in members:
            value = geometric * tokens[i].weight
            terms[i] = (value, {j: value / len(members) for j in free})
    return terms


def sft(tokens: Sequence[Token]) -> Terms:
    """A * logp."""
    return [(t.weight * t.logp, {i: t.weight}) for i, t in enumerate(tokens)]


def opd(tokens: Sequence[Token], reward_coeff: float = 0.0, level: str = "token") -> Terms:
    """sg(rho) * A * logp, A = sg(teacher - student) + reward_coeff * weight."""
    terms: Terms = []
    for i, t in enumerate(tokens):
        gap = t.teacher - t.logp
        if level == "turn":
            gaps = [u.teacher - u.logp for u in tokens if u.turn == t.turn]
            gap = sum(gaps) / len(gaps)
        advantage = gap + reward_coeff * t.weight
        rho = math.exp(t.logp - t.behavior)
        terms.append((rho * advantage * t.logp, {i: rho * advantage}))
    return terms


def minus_kl(tokens: Sequence[Token], estimator: str, importance: bool = True) -> Terms:
    """-sg(rho) * k2 or k3 (a penalty, hence minus)."""
    terms: Terms = []
    for i, t in enumerate(tokens):
        rho = math.exp(t.logp - t.behavior) if importance else 1.0
        k1 = t.logp - t.reference
        if estimator == "k2":
            value, slope = k1 * k1 / 2, k1
        else:
            value, slope = math.exp(-k1) - 1 + k1, 1 - math.exp(-k1)
        terms.append((-rho * value, {i: -rho * slope}))
    return terms


def loss_and_gradient(
    terms: Terms, tokens: Sequence[Token], how: str, length: float = 1.0
) -> tuple[float, list[float]]:
    """Minus the aggregated objective, and its derivative by every log-prob.

    `how` is token_mean, turn_mean, rollout_mean, group_mean or constant.
    """

    def aggregated(value: Callable[[Term], float]) -> float:
        values = [value(term) for term in terms]
        if how == "token_mean":
            return sum(values) / len(values)
        if how == "constant":
            return sum(values) / (length * len({t.rollout for t in tokens}))
        means = []
        for members in sequences(tokens, how.removesuffix("_mean")):
            means.append(sum(values[i] for i in members) / len(members))
        return sum(means) / len(means)

    loss = -aggregated(lambda term: term[0])
    gradient = [
        -aggregated(lambda term, i=i: term[1].get(i, 0.0))  # type: ignore[misc]
        for i in range(len(tokens))
    ]
    return loss, gradient
