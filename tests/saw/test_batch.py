from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from ludic.errors import BatchError, CreditError
from ludic.saw import SampleAttachments, SAWItem, TurnSpan, count_items, make_batch
from ludic.saw import batch as batch_module


def item(**changes: object) -> SAWItem:
    plain = SAWItem(
        input_ids=np.array([1, 2, 3, 4]),
        attention_mask=np.ones(4, dtype=np.int8),
        action_mask=np.array([0, 1, 0, 1], dtype=np.int8),
        weight=1.0,
        rollout_id="r",
    )
    return replace(plain, **changes)


def test_an_item_made_by_hand_becomes_one_turn_of_a_rollout_of_its_own() -> None:
    batch = make_batch([item(rollout_id=""), item(rollout_id="")])
    assert [i.rollout_id for i in batch.items] == ["item-0", "item-1"]
    assert batch.items[0].turns == (TurnSpan(0, 2, 0, 1.0),)
    assert batch.counts == count_items(batch.items)
    assert (batch.counts.tokens, batch.counts.turns, batch.counts.groups) == (4, 2, 2)


def test_rollouts_of_a_group_count_as_one_group() -> None:
    batch = make_batch(
        [item(rollout_id="a", group_id="g"), item(rollout_id="b", group_id="g"), item()]
    )
    assert (batch.counts.rollouts, batch.counts.groups) == (3, 2)


def test_two_rollouts_of_one_name_are_not_counted_as_one() -> None:
    maths, again, code = ({"env": env, "total_reward": 1.0} for env in ("maths", "maths", "code"))
    make_batch([item(meta=maths), item(meta=again)])  # one that forked
    make_batch([item(meta=maths), item()])  # made by hand, it does not say
    with pytest.raises(BatchError, match=r"both called 'r': .*'maths'.*'code'"):
        make_batch([item(meta=maths), item(meta=code)])


@pytest.mark.parametrize("mask", ["action_mask", "attention_mask"])
def test_a_mask_of_the_wrong_length_is_refused(mask: str) -> None:
    with pytest.raises(BatchError, match=rf"item 0 \(rollout 'r'\): {mask} has 3 entries for 4"):
        make_batch([item(**{mask: np.ones(3, dtype=np.int8)})])


@pytest.mark.parametrize(
    "name", ["behavior_logprobs", "reference_logprobs", "teacher_logprobs", "token_weights"]
)
def test_attachments_of_the_wrong_length_are_refused(name: str) -> None:
    attached = SampleAttachments(**{name: np.zeros(3, dtype=np.float32)})  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=f"{name} has 3 entries for 2 action tokens"):
        make_batch([item(attachments=attached)])


@pytest.mark.parametrize("weight", [math.inf, -math.inf, math.nan])
def test_a_weight_that_is_not_finite_is_refused(weight: float) -> None:
    with pytest.raises((CreditError, BatchError), match="weight is"):
        make_batch([item(weight=weight)])
    attached = SampleAttachments(token_weights=np.array([0.0, weight], dtype=np.float32))
    with pytest.raises(CreditError, match="weight of action token 1"):
        make_batch([item(attachments=attached)])


def test_an_action_that_nothing_predicts_is_refused() -> None:
    with pytest.raises(BatchError, match="first token is an action"):
        make_batch([item(action_mask=np.array([1, 0, 0, 0], dtype=np.int8))])


def test_so_it_is_in_an_item_that_is_complete() -> None:
    whole = item(turns=(TurnSpan(0, 2, 0, 1.0),), action_mask=np.array([1, 0, 1, 0], np.int8))
    with pytest.raises(BatchError, match="first token is an action"):
        make_batch([whole])


def test_an_item_without_actions_is_refused() -> None:
    with pytest.raises(BatchError, match="no token is an action"):
        make_batch([item(action_mask=np.zeros(4, dtype=np.int8))])


@pytest.mark.parametrize(
    "turns",
    [
        (TurnSpan(0, 1, 0, 1.0),),
        (TurnSpan(0, 1, 0, 1.0), TurnSpan(1, 3, 1, 1.0)),
        (TurnSpan(1, 2, 0, 1.0),),
    ],
)
def test_turns_must_cover_the_action_tokens(turns: tuple[TurnSpan, ...]) -> None:
    with pytest.raises(BatchError, match="turn"):
        make_batch([item(turns=turns)])


def test_an_empty_batch_has_no_counts() -> None:
    counts = make_batch([]).counts
    assert (counts.tokens, counts.turns, counts.rollouts, counts.groups) == (0, 0, 0, 0)


def test_a_turn_without_an_action_token_is_refused() -> None:
    with pytest.raises(BatchError, match="turn 0 covers 0 to 0"):
        make_batch([item(turns=(TurnSpan(0, 0, 0, 1.0), TurnSpan(0, 2, 1, 1.0)))])


SOUND = item(turns=(TurnSpan(0, 1, 0, 1.0), TurnSpan(1, 2, 1, 1.0)))


def _floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    "fault",
    [
        {"action_mask": np.array([0, 1, 1], np.int8)},
        {"attention_mask": np.ones(5, np.int8)},
        {"action_mask": np.zeros(4, np.int8)},
        {"action_mask": np.array([1, 0, 0, 1], np.int8)},
        {"action_mask": np.array([0, 1, 1, 1], np.int8)},
        {"turns": (TurnSpan(0, 1, 0, 1.0),)},
        {"turns": (TurnSpan(0, 1, 0, 1.0), TurnSpan(1, 3, 1, 1.0))},
        {"turns": (TurnSpan(1, 2, 0, 1.0),)},
        {"turns": (TurnSpan(0, 2, 0, 1.0), TurnSpan(2, 2, 1, 1.0))},
        {"weight": math.inf},
        {"weight": math.nan},
        {"attachments": SampleAttachments(token_weights=_floats(1.0, math.nan))},
        {"attachments": SampleAttachments(behavior_logprobs=_floats(1.0))},
        {"attachments": SampleAttachments(kept_token_ids=[np.zeros(0, np.int64)] * 3)},
        {"input_ids": np.zeros(0), "attention_mask": _floats(), "action_mask": _floats()},
    ],
)
def test_a_fault_is_found_among_items_that_are_sound(fault: dict[str, object]) -> None:
    assert make_batch([SOUND] * 3).items == (SOUND,) * 3
    with pytest.raises((BatchError, CreditError), match=r"^item 1 \(rollout 'r'\): "):
        make_batch([SOUND, replace(SOUND, **fault), SOUND])


def test_an_item_without_a_rollout_is_completed_among_others() -> None:
    batch = make_batch([SOUND, replace(SOUND, rollout_id=""), replace(SOUND, turns=())])
    assert [i.rollout_id for i in batch.items] == ["r", "item-1", "r"]
    assert batch.items[2].turns == (TurnSpan(0, 2, 0, 1.0),)
    batch = make_batch([SOUND, replace(SOUND, rollout_id="")])
    assert [i.rollout_id for i in batch.items] == ["r", "item-1"]


def test_items_that_are_complete_and_sound_are_not_looked_at_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = SampleAttachments(token_weights=_floats(1.0, 2.0), behavior_logprobs=_floats(0, 0))
    items = (SOUND, replace(SOUND, weight=math.nan, attachments=weights))
    monkeypatch.delattr(batch_module, "_completed")
    assert make_batch(items).items == items
