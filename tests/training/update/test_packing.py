"""Packing changes neither loss nor gradient, and refuses what cannot be trained on."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ludic.errors import BatchError, CreditError
from ludic.inference.tiny import tiny_model
from ludic.saw.batch import count_items, make_batch
from ludic.saw.items import (
    UNKNOWN_VERSION,
    SampleAttachments,
    SAWBatch,
    SAWItem,
    TurnSpan,
)
from ludic.training.update.packing import RowOrder, lay_out, pack
from ludic.training.update.planning import Cost, plan_micro_batches
from ludic.training.update.policy import Policy
from tests.training.synthetic import synthetic_batch, synthetic_item


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    rollouts=st.integers(1, 12),
    budget=st.integers(30, 120),
    world=st.integers(1, 4),
    scope=st.sampled_from(["token", "turn", "rollout"]),
)
def test_a_plan_covers_every_item_once_within_the_budget(
    seed: int, rollouts: int, budget: int, world: int, scope: str
) -> None:
    layout = lay_out(synthetic_batch(seed, rollouts))
    plan = plan_micro_batches(
        layout,
        micro_token_budget=budget,
        scope=scope,  # type: ignore[arg-type]
        cost=Cost(0.01),
        world_size=world,
    )
    assert len(plan) == world
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(rollouts))
    for micro in (m for rank in plan for m in rank):
        assert sum(layout.packed[i].input_ids.size for i in micro) <= budget


def test_rows_of_one_turn_or_rollout_share_a_micro_batch_where_the_loss_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = np.random.default_rng(0)
    rows = [synthetic_item(rng, f"r{i}", "g", 1) for i in range(3)]
    forked = replace(
        synthetic_item(rng, "r0", "g", 1),
        turns=(TurnSpan(0, 0, 0, 1.0),),
    )
    count = int(forked.action_mask.sum())
    same_turn = replace(forked, turns=(TurnSpan(0, count, 0, 1.0),))
    next_turn = replace(forked, turns=(TurnSpan(0, count, 1, 1.0),))
    longest = max(len(i.input_ids) for i in [*rows, forked])

    def micro_of(extra: SAWItem, scope: str, budget: int) -> list[tuple[int, ...]]:
        layout = lay_out(make_batch([*rows, extra]))
        return plan_micro_batches(layout, micro_token_budget=budget, scope=scope)[0]  # type: ignore[arg-type]

    together = [m for m in micro_of(same_turn, "turn", 2 * longest) if 0 in m]
    assert 3 in together[0]
    together = [m for m in micro_of(next_turn, "rollout", 2 * longest) if 0 in m]
    assert 3 in together[0]
    # How calls fork is known only in the middle of a run, which must not end for it.
    caplog.clear()
    together = [m for m in micro_of(same_turn, "turn", longest) if 0 in m]
    assert together == [(0, 3)]
    assert "must see together (scope 'turn')" in caplog.text
    with pytest.raises(BatchError, match=r"over micro_token_budget=2: raise it"):
        micro_of(same_turn, "token", 2)


def test_micro_batches_are_balanced_by_cost_and_not_by_count() -> None:
    rng = np.random.default_rng(0)
    items = []
    for i, length in enumerate([1000, 1000, *[100] * 20]):
        mask = np.zeros(length, dtype=np.int8)
        mask[-5:] = 1
        items.append(SAWItem(rng.integers(0, 9, length), np.ones(length, np.int8), mask, 1.0))
        del i
    layout = lay_out(make_batch(items))
    cost = Cost(0.01)
    plan = plan_micro_batches(layout, micro_token_budget=2100, cost=cost, world_size=2)
    loads = [sum(cost(layout.packed[i].input_ids.size) for m in rank for i in m) for rank in plan]
    assert max(loads) / min(loads) < 1.05
    assert [sum(i < 2 for m in rank for i in m) for rank in plan] == [1, 1]


def test_a_packed_row_is_the_sequence_alone() -> None:
    batch = synthetic_batch(7, 5)
    model = tiny_model().double()
    policy = Policy(model)
    layout = lay_out(batch)
    packed = policy.score(pack(layout, range(5)), entropy=True)
    alone = [policy.score(pack(layout, [i]), entropy=True) for i in range(5)]
    assert packed.entropy is not None
    torch.testing.assert_close(packed.logprobs, torch.cat([a.logprobs for a in alone]))
    torch.testing.assert_close(
        packed.entropy, torch.cat([a.entropy for a in alone if a.entropy is not None])
    )


def test_packed_logprobs_are_those_of_the_model_itself() -> None:
    batch = synthetic_batch(3, 4)
    model = tiny_model().double()
    expected = []
    for item in batch.items:
        logits = model(torch.from_numpy(item.input_ids)[None]).logits[0] / item.temperature
        where = np.flatnonzero(item.action_mask)
        logp = logits.log_softmax(1)[where - 1]
        expected.append(logp.gather(1, torch.from_numpy(item.input_ids[where])[:, None])[:, 0])
    ours = Policy(model).score(pack(lay_out(batch), range(4)))
    torch.testing.assert_close(ours.logprobs, torch.cat(expected), rtol=1e-6, atol=1e-8)


def test_the_lengths_that_a_loss_divides_by_are_those_of_the_whole_batch() -> None:
    layout = lay_out(synthetic_batch(5, 6))
    turns: dict[int, int] = {}
    for p in layout.packed:
        for turn in p.turn_ids:
            turns[int(turn)] = turns.get(int(turn), 0) + 1
    micro = pack(layout, [2, 4]).loss
    for token, local in enumerate(micro.turn_ids.tolist()):
        flat = np.concatenate([layout.packed[2].turn_ids, layout.packed[4].turn_ids])
        assert int(micro.turn_lengths[local]) == turns[int(flat[token])]
    assert micro.counts == layout.counts
    assert int(micro.rollout_lengths.sum()) == len(micro.weights)
    group_tokens = {p.group_id: 0 for p in layout.packed}
    for p in layout.packed:
        group_tokens[p.group_id] += p.actions.size
    assert micro.group_lengths.tolist() == [
        group_tokens[layout.packed[2].group_id],
        group_tokens[layout.packed[4].group_id],
    ]


def test_masked_tokens_are_left_out() -> None:
    item = synthetic_batch(1, 1).items[0]
    padded = replace(
        item,
        input_ids=np.concatenate([item.input_ids, [0, 0, 0]]),
        attention_mask=np.concatenate([item.attention_mask, [0, 0, 0]]).astype(np.int8),
        action_mask=np.concatenate([item.action_mask, [0, 0, 0]]).astype(np.int8),
    )
    plain, with_padding = (pack(lay_out(make_batch([i])), [0]) for i in (item, padded))
    assert torch.equal(plain.input_ids, with_padding.input_ids)
    assert torch.equal(plain.action_positions, with_padding.action_positions)


def padded_left(item: SAWItem, count: int) -> SAWItem:
    zeros = np.zeros(count, np.int8)
    return replace(
        item,
        input_ids=np.concatenate([zeros, item.input_ids]),
        attention_mask=np.concatenate([zeros, item.attention_mask]),
        action_mask=np.concatenate([zeros, item.action_mask]),
    )


def test_padding_counts_neither_as_length_nor_as_what_predicts_the_first_token() -> None:
    item = synthetic_batch(1, 1).items[0]
    padded = padded_left(item, 3)
    lay_out(make_batch([padded]), max_seq_len=len(item.input_ids))
    with pytest.raises(BatchError, match=f"{len(item.input_ids)} tokens, over max_seq_len"):
        lay_out(make_batch([padded]), max_seq_len=len(item.input_ids) - 1)
    begins = np.flatnonzero(item.action_mask)[0]
    unpredicted = replace(
        item,
        input_ids=item.input_ids[begins:],
        attention_mask=item.attention_mask[begins:],
        action_mask=item.action_mask[begins:],
    )
    with pytest.raises(BatchError, match="first token is an action"):
        lay_out(make_batch([padded_left(unpredicted, 3)]))


def test_rows_without_a_group_are_a_group_by_rollout() -> None:
    items = synthetic_batch(1, 4).items
    mixed = [
        replace(items[0], rollout_id="a", group_id=None),
        replace(items[1], rollout_id="a", group_id=None),
        replace(items[2], rollout_id="b", group_id=None),
        replace(items[3], rollout_id="c", group_id="g"),
    ]
    layout = lay_out(make_batch(mixed))
    assert [p.group_id for p in layout.packed] == [0, 0, 1, 2]
    assert [p.rollout_id for p in layout.packed] == [0, 0, 1, 2]
    counts = [p.actions.size for p in layout.packed]
    assert layout.group_lengths.tolist() == [counts[0] + counts[1], counts[2], counts[3]]
    assert layout.rollout_lengths.tolist() == layout.group_lengths.tolist()


def test_groups_are_numbered_as_they_are_counted_whatever_their_names() -> None:
    items = synthetic_batch(1, 6).items
    names = [("a", None), ("b", None), ("c", "a"), ("d", "a"), ("e", ""), ("f", "")]
    batch = make_batch(
        [
            replace(i, rollout_id=rollout, group_id=group)
            for i, (rollout, group) in zip(items, names, strict=True)
        ]
    )
    layout = lay_out(batch)
    assert [p.group_id for p in layout.packed] == [0, 1, 2, 2, 3, 3]
    assert len(layout.group_lengths) == batch.counts.groups == 4


def test_a_weight_of_its_own_is_every_action_tokens() -> None:
    item = synthetic_batch(1, 1).items[0]
    plain = replace(
        item, weight=0.5, turns=(), attachments=replace(item.attachments, token_weights=None)
    )
    micro = pack(lay_out(make_batch([plain])), [0])
    assert micro.loss.weights.tolist() == [0.5] * int(item.action_mask.sum())


def test_every_tensor_goes_to_the_device() -> None:
    items = [
        replace(
            item,
            attachments=replace(
                item.attachments, kept_token_ids=[np.array([t]) for t in item.input_ids[where]]
            ),
        )
        for item in synthetic_batch(1, 4, prompt=20).items
        for where in [np.flatnonzero(item.action_mask)]
    ]
    micro = pack(lay_out(make_batch(items)), range(4), share=True)
    moved = micro.to(torch.device("meta"))
    assert micro.kept is not None
    assert micro.keys is not None
    for part, other in (
        (micro, moved),
        (micro.loss, moved.loss),
        (micro.kept, moved.kept),
        (micro.keys, moved.keys),
    ):
        for field in fields(part):
            before, after = getattr(part, field.name), getattr(other, field.name)
            if isinstance(before, torch.Tensor):
                assert (before.device.type, after.device.type) == ("cpu", "meta")
                assert before.shape == after.shape


def test_ids_that_sampling_kept_are_those_of_each_token_and_none_means_all() -> None:
    first, second = synthetic_batch(1, 2).items
    targets = first.input_ids[np.flatnonzero(first.action_mask)]
    kept = [np.array([t, 251, 252][: n + 1]) for n, t in enumerate(targets[:3])]
    kept += [np.zeros(0, np.int64)] * (len(targets) - len(kept))
    narrowed = replace(first, attachments=replace(first.attachments, kept_token_ids=kept))
    layout = lay_out(make_batch([narrowed, second]))
    assert pack(layout, [1]).kept is None
    both = pack(layout, [1, 0]).kept
    assert both is not None
    others = int(second.action_mask.sum())
    lengths = [0] * others + [len(k) for k in kept]
    assert both.offsets.tolist() == np.cumsum([0, *lengths]).tolist()
    assert both.ids.tolist() == np.concatenate(kept).tolist()


def bad(item: SAWItem, **changes: object) -> SAWBatch:
    return SAWBatch((replace(item, **changes),), count_items([item]))


def test_bad_samples_are_named() -> None:
    item = synthetic_batch(2, 1).items[0]
    length, count = len(item.input_ids), int(item.action_mask.sum())
    first = item.action_mask.copy()
    first[0] = 1
    short = replace(item.attachments, behavior_logprobs=np.zeros(1, np.float32))
    nothing = {
        "action_mask": np.zeros(length, np.int8),
        "turns": (),
        "weight": 1.0,
        "attachments": SampleAttachments(),
    }
    cases: list[tuple[dict[str, object], str]] = [
        (nothing, "no token is an action"),
        ({"attention_mask": np.ones(length + 1, np.int8)}, "attention_mask has"),
        ({"action_mask": first}, "first token is an action"),
        ({"attention_mask": 1 - item.action_mask}, "hidden by the attention mask"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"attachments": short}, "behavior_logprobs has 1 entries"),
        ({"turns": (replace(item.turns[0], end=0),)}, "turns must follow each other"),
    ]
    for changes, said in cases:
        with pytest.raises(BatchError, match=said):
            lay_out(bad(item, **changes))
    for name in ("behavior_logprobs", "reference_logprobs", "teacher_logprobs"):
        rounded = np.full(count, 1e-6, np.float32)
        changed: dict[str, Any] = {name: rounded}
        lay_out(bad(item, attachments=replace(item.attachments, **changed)))
        rounded[-1] = 3.0
        with pytest.raises(BatchError, match=rf"{name} of action token {count - 1} is 3.0, above"):
            lay_out(bad(item, attachments=replace(item.attachments, **changed)))
    endless = replace(item.attachments, token_weights=np.full(count, np.inf, np.float32))
    with pytest.raises(CreditError, match="weight of action token 0 is inf"):
        lay_out(bad(item, attachments=endless))
    with pytest.raises(BatchError, match=r"has no samples.*dropped by filters: \{'parse': 3\}"):
        lay_out(make_batch([], {"dropped": {"parse": 3}}))
    with pytest.raises(BatchError, match=rf"rollout '2-r0'.*{length} tokens.*max_seq_len=4"):
        lay_out(bad(item), max_seq_len=4)
    kept = replace(item.attachments, kept_token_ids=[np.array([VOCAB_END])] * count)
    layout = lay_out(bad(item, attachments=kept))
    with pytest.raises(BatchError, match="not among the ids"):
        pack(layout, [0])


VOCAB_END = 10_000


def test_a_batch_that_was_given_other_items_and_not_counted_again_is_refused() -> None:
    batch = synthetic_batch(2, 4)
    with pytest.raises(BatchError, match=r"rollouts=4.*rollouts=2.*make_batch"):
        lay_out(replace(batch, items=batch.items[:2]))
    lay_out(make_batch(batch.items[:2], batch.meta))


@pytest.mark.parametrize("name", ["behavior_logprobs", "reference_logprobs", "teacher_logprobs"])
def test_log_probs_that_only_some_samples_have_are_an_error_before_any_packing(name: str) -> None:
    batch = synthetic_batch(2, 2)
    values = [np.full(int(item.action_mask.sum()), -1.0, np.float32) for item in batch.items]
    first, second = batch.items
    has = replace(first, attachments=replace(first.attachments, **{name: values[0]}))
    lacks = replace(second, attachments=replace(second.attachments, **{name: None}))
    with pytest.raises(BatchError, match=rf"sample 1 \(rollout '2-r1'.* has no {name}"):
        lay_out(make_batch([has, lacks]))


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_a_log_prob_that_is_not_finite_is_refused_by_name(value: float) -> None:
    item = synthetic_batch(2, 1).items[0]
    assert item.attachments.behavior_logprobs is not None
    broken = item.attachments.behavior_logprobs.copy()
    broken[-1] = value
    at = len(broken) - 1
    with pytest.raises(BatchError, match=rf"rollout '2-r0'.*action token {at} is {value}"):
        lay_out(bad(item, attachments=replace(item.attachments, behavior_logprobs=broken)))


def test_versions_that_only_some_samples_have_are_unknown_for_the_others() -> None:
    batch = synthetic_batch(2, 2)
    second = batch.items[1]
    lacking = replace(second, attachments=replace(second.attachments, versions=None))
    layout = lay_out(make_batch([batch.items[0], lacking]))
    count = int(second.action_mask.sum())
    for indices in ([0, 1], [1]):
        versions = pack(layout, indices).loss.versions
        assert versions is not None
        assert versions[-count:].tolist() == [UNKNOWN_VERSION] * count


def test_rows_that_cannot_pack_get_a_micro_batch_each() -> None:
    layout = lay_out(synthetic_batch(3, 5))
    (plan,) = plan_micro_batches(layout, micro_token_budget=1000, longest_packed=0)
    assert sorted(plan) == [(i,) for i in range(5)]
    ranks = plan_micro_batches(layout, micro_token_budget=1000, longest_packed=0, world_size=2)
    assert [len(rank) for rank in ranks] == [3, 3]
    assert sorted(m for rank in ranks for m in rank if m) == [(i,) for i in range(5)]


def test_rows_that_ranks_would_have_to_run_in_different_numbers_are_refused() -> None:
    items = synthetic_batch(3, 2).items
    forked = [replace(item, rollout_id="r", group_id="g") for item in items]
    layout = lay_out(make_batch(forked))
    (plan,) = plan_micro_batches(layout, micro_token_budget=1000, scope="rollout", longest_packed=0)
    assert plan == [(0, 1)]
    with pytest.raises(BatchError, match=r"rollout 'r'.*cannot pack rows.*train on one rank"):
        plan_micro_batches(
            layout, micro_token_budget=1000, scope="rollout", longest_packed=0, world_size=2
        )


@pytest.mark.parametrize(
    ("length", "common", "shared"), [(8, 1, 1), (9, 1, 0), (16, 2, 2), (17, 2, 0), (17, 3, 3)]
)
def test_a_row_shares_one_in_eight_of_its_tokens_or_none(
    length: int, common: int, shared: int
) -> None:
    start = [5] * common
    order = RowOrder.of([np.array([*start, 6]), np.array([*start, *[7] * (length - common)])])
    assert order.arrange((0, 1)) == [(0, 0), (1, shared)]
