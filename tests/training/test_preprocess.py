"""What is done to whole macro-batches: baselines, dropped groups, KL in the reward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ludic.errors import ConfigError, NotTrainableError
from ludic.saw.batch import make_batch
from ludic.saw.building import build_items
from ludic.saw.items import SampleAttachments, SAWBatch, SAWItem, TurnSpan
from ludic.training import GroupNormalizedReturn, KLInReward, MonteCarloReturn
from ludic.training.preprocess import (
    chain,
    drop_zero_variance_groups,
    subtract_mean,
    turn_weights,
)
from ludic.types import Rollout
from tests.oracles.rollouts import make_rollout

rewards = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=4)


def token_weights(batch: SAWBatch) -> dict[tuple[str, int], list[float]]:
    """Every turn's token weights, as the trainer reads them."""
    found = {}
    for item in batch.items:
        weights = item.attachments.token_weights
        for span in item.turns:
            if weights is None:
                own = [item.weight] * (span.end - span.start)
            else:
                own = weights[span.start : span.end].tolist()
            found[item.rollout_id, span.turn_index] = own
    return found


def make(rollouts: list[Rollout], merge: bool = True) -> SAWBatch:
    return make_batch(build_items(rollouts, MonteCarloReturn().compute(rollouts), merge=merge))


@given(all_rewards=st.lists(rewards, min_size=1, max_size=4), merge=st.booleans())
@settings(max_examples=25)
def test_the_baseline_is_the_mean_over_turns_whether_or_not_they_are_merged(
    all_rewards: list[list[float]], merge: bool
) -> None:
    rollouts = [make_rollout(str(i), r) for i, r in enumerate(all_rewards)]
    credit = MonteCarloReturn().compute(rollouts)
    baseline = sum(credit.values()) / len(credit)
    batch = subtract_mean(make(rollouts, merge))
    assert sum(turn_weights(batch).values()) == pytest.approx(0, abs=1e-9)
    for key, weights in token_weights(batch).items():
        assert weights == pytest.approx([credit[key] - baseline] * 2, abs=1e-6)


def test_groups_without_variance_are_dropped_counted_and_no_longer_in_the_normalisers() -> None:
    rollouts = [
        make_rollout(f"{g}{i}", [reward, 0.0], group=g)
        for g, pair in {"flat": (1.0, 1.0), "live": (0.0, 1.0)}.items()
        for i, reward in enumerate(pair)
    ]
    items = build_items(rollouts, GroupNormalizedReturn(2).compute(rollouts))
    before = make_batch(items, {"dropped": {"truncated": 3}, "other": 1})
    batch = drop_zero_variance_groups(before)
    assert {item.group_id for item in batch.items} == {"live"}
    assert batch.counts.groups == 1
    assert batch.counts.rollouts == 2
    assert batch.meta["dropped"] == {"truncated": 3, "zero_variance_group": 4}
    assert batch.meta["other"] == 1
    assert drop_zero_variance_groups(batch) is batch


def scored(batch: SAWBatch, reference: float) -> SAWBatch:
    def one(item: SAWItem) -> SAWItem:
        n = int(item.action_mask.sum())
        values = np.full(n, reference, dtype=np.float32)
        return replace(item, attachments=replace(item.attachments, reference_logprobs=values))

    return replace(batch, items=tuple(one(item) for item in batch.items))


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize(
    ("horizon", "expected"),
    [
        # Behaviour log-probs are (-0.5, -1.0) in each turn and the reference's -1.5, so that the
        # charges are 0.1·(1.0, 0.5) per turn, taken off weights 3 and 2.
        ("token", [[2.9, 2.95], [1.9, 1.95]]),
        ("turn", [[2.85, 2.95], [1.85, 1.95]]),
        ("rollout", [[2.7, 2.8], [1.85, 1.95]]),
    ],
)
def test_kl_in_the_reward_charges_the_tokens_up_to_the_horizon(
    horizon: str, expected: list[list[float]], merge: bool
) -> None:
    batch = scored(make([make_rollout("a", [1.0, 2.0])], merge), -1.5)
    charged = token_weights(KLInReward(0.1, horizon)(batch))  # type: ignore[arg-type]
    assert charged["a", 0] == pytest.approx(expected[0])
    assert charged["a", 1] == pytest.approx(expected[1])


def test_kl_in_the_reward_says_what_is_missing() -> None:
    with pytest.raises(NotTrainableError, match="reference log-probs"):
        KLInReward(0.1)(make([make_rollout("a", [1.0])]))
    with pytest.raises(ConfigError, match="horizon"):
        KLInReward(0.1, "episode")  # type: ignore[arg-type]


def test_a_chain_runs_each_step_once_from_left_to_right() -> None:
    calls: list[str] = []

    def first(batch: SAWBatch) -> SAWBatch:
        calls.append("first")
        return batch

    def second(batch: SAWBatch) -> SAWBatch:
        calls.append("second")
        return batch

    both = chain(first, None, second)
    again = chain(both, second)
    assert again is not None
    again(make([make_rollout("a", [1.0])]))
    assert calls == ["first", "second"]
    assert chain(None, None) is None
    assert chain(first) is first


@pytest.mark.parametrize("turns", [1, 2])
def test_kl_in_the_reward_has_the_expected_gradient_of_the_kl_of_whole_rollouts(
    turns: int,
) -> None:
    # Two tokens from a vocabulary of three, in one turn or in two: nine rollouts, each with its
    # probability, give the expectation as a finite sum.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(4, 3, generator=generator, dtype=torch.float64).log_softmax(1)
    logp = logits.log_softmax(1)
    exact, estimate = torch.zeros(()).double(), torch.zeros(()).double()
    for first in range(3):
        for second in range(3):
            mine = torch.stack([logp[0, first], logp[1 + first, second]])
            others = torch.stack([reference[0, first], reference[1 + first, second]])
            exact = exact - 0.3 * mine.sum().exp() * (mine - others).sum()
            spans = (
                (TurnSpan(0, 2, 0, 0.0),)
                if turns == 1
                else (TurnSpan(0, 1, 0, 0.0), TurnSpan(1, 2, 1, 0.0))
            )
            item = SAWItem(
                input_ids=np.array([7, first, second]),
                attention_mask=np.ones(3, dtype=np.int8),
                action_mask=np.array([0, 1, 1], dtype=np.int8),
                weight=0.0,
                attachments=SampleAttachments(
                    behavior_logprobs=mine.detach().numpy().astype(np.float32),
                    reference_logprobs=others.numpy().astype(np.float32),
                ),
                turns=spans,
                rollout_id="r",
            )
            (charged,) = KLInReward(0.3, "rollout")(make_batch([item])).items
            weights = torch.from_numpy(charged.attachments.token_weights).double()
            estimate = estimate + mine.detach().sum().exp() * (weights * mine).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
