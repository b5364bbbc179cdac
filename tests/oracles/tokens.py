"""Action tokens as plain records: what the references read, and what hypothesis draws."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from ludic.saw.items import BatchCounts
from ludic.training.types import LossBatch, TokenLogProbs


@dataclass(frozen=True)
class Token:
    """One action token of a macro-batch, in float64."""

    logp: float
    behavior: float
    weight: float
    turn: int
    rollout: int
    group: int
    proximal: float = 0.0
    reference: float = 0.0
    teacher: float = 0.0
    entropy: float = 0.0


@st.composite
def token_lists(
    draw: st.DrawFn, *, drift: float = 1.0, weight_per: str = "turn", min_rollouts: int = 1
) -> list[Token]:
    """Macro-batches of a few groups, rollouts and turns, in which each turn has one weight.

    hypothesis draws the shape; the numbers come from a generator that it seeds, which is faster.
    """
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    tokens: list[Token] = []
    turn = rollout = 0
    for group in range(draw(st.integers(1, 3))):
        for turns in draw(
            st.lists(
                st.lists(st.integers(1, 4), min_size=1, max_size=3),
                min_size=min_rollouts,
                max_size=3,
            )
        ):
            weight = rng.uniform(-2, 2)
            for length in turns:
                if weight_per == "turn":
                    weight = rng.choice([0.0, rng.uniform(-2, 0), rng.uniform(0, 2)])
                for _ in range(length):
                    logp = rng.uniform(-4, 0)
                    tokens.append(
                        Token(
                            logp=logp,
                            behavior=logp + rng.uniform(-drift, drift),
                            weight=weight,
                            turn=turn,
                            rollout=rollout,
                            group=group,
                            proximal=logp + rng.uniform(-drift, drift),
                            reference=logp + rng.uniform(-drift, drift),
                            teacher=logp + rng.uniform(-drift, drift),
                            entropy=rng.uniform(0, 3),
                        )
                    )
                turn += 1
            rollout += 1
    return tokens


def loss_inputs(
    tokens: Sequence[Token], members: Sequence[int] | None = None
) -> tuple[TokenLogProbs, LossBatch]:
    """The tensors of a micro-batch that holds the `members` of the macro-batch `tokens`."""
    members = range(len(tokens)) if members is None else members

    def column(name: str) -> torch.Tensor:
        values = [getattr(tokens[i], name) for i in members]
        return torch.tensor(values, dtype=torch.float64)

    def local(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        mine = [getattr(tokens[i], name) for i in members]
        names = sorted(set(mine))
        everyone = [getattr(token, name) for token in tokens]
        ids = torch.tensor([names.index(value) for value in mine], dtype=torch.int64)
        lengths = torch.tensor([everyone.count(value) for value in names], dtype=torch.int64)
        return ids, lengths

    turn_ids, turn_lengths = local("turn")
    rollout_ids, rollout_lengths = local("rollout")
    group_ids, group_lengths = local("group")
    counts = BatchCounts(
        len(tokens),
        len({t.turn for t in tokens}),
        len({t.rollout for t in tokens}),
        len({t.group for t in tokens}),
    )
    batch = LossBatch(
        weights=column("weight"),
        turn_ids=turn_ids,
        rollout_ids=rollout_ids,
        group_ids=group_ids,
        turn_lengths=turn_lengths,
        rollout_lengths=rollout_lengths,
        group_lengths=group_lengths,
        counts=counts,
        behavior_logprobs=column("behavior"),
        proximal_logprobs=column("proximal"),
        reference_logprobs=column("reference"),
        teacher_logprobs=column("teacher"),
    )
    policy = TokenLogProbs(
        logprobs=column("logp").requires_grad_(),
        entropy=column("entropy").requires_grad_(),
    )
    return policy, batch
