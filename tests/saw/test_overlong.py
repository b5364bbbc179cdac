"""A sample that is too long costs its episode, where an episode was played for it."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ludic.saw import SAWBatch, SAWItem, drop_overlong_episodes, make_batch


def item(rollout: str, group: str | None, length: int, agent: str = "a", turns: int = 1) -> SAWItem:
    actions = np.zeros(length, np.int8)
    actions[-turns:] = 1
    one = SAWItem(
        input_ids=np.arange(length),
        attention_mask=np.ones(length, np.int8),
        action_mask=actions,
        weight=1.0,
        rollout_id=f"{rollout}/{agent}",
        group_id=None if group is None else f"{group}/{agent}",
        meta={"episode_id": rollout, "agent_id": agent},
    )
    return make_batch([one]).items[0]


def batch(*items: SAWItem, policy: str | None = "drop_group") -> SAWBatch:
    meta = {"dropped": {"truncated": 2}, "item_tokens_max": 9}
    return make_batch(items, meta if policy is None else {**meta, "lost_member": policy})


def kept(found: SAWBatch) -> list[str]:
    return [item.rollout_id for item in found.items]


def test_the_group_of_a_lost_episode_follows_the_policy_for_failed_members() -> None:
    items = (item("e1", "g1", 9), item("e2", "g1", 4), item("e3", "g2", 8), item("e4", None, 5))
    whole = drop_overlong_episodes(batch(*items), 8)
    assert kept(whole) == ["e3/a", "e4/a"]
    assert whole.meta["dropped"] == {"truncated": 2, "overlong": 1, "group_lost_member": 1}
    assert whole.meta["overlong_episodes"] == 1
    assert whole.meta["item_tokens_max"] == 8
    assert whole.counts.rollouts == 2
    partial = drop_overlong_episodes(batch(*items, policy="keep_partial"), 8)
    assert kept(partial) == ["e2/a", "e3/a", "e4/a"]
    assert partial.meta["dropped"] == {"truncated": 2, "overlong": 1}


def test_an_episode_is_lost_with_all_its_roles_and_so_is_its_group() -> None:
    items = (
        *(item("e1", "g1", 9, "x"), item("e1", "g1", 4, "o")),
        *(item("e2", "g1", 4, "x"), item("e2", "g1", 4, "o")),
        item("e3", "g2", 4, "x"),
    )
    found = drop_overlong_episodes(batch(*items), 8)
    assert kept(found) == ["e3/x"]
    assert found.meta["dropped"] == {"truncated": 2, "overlong": 2, "group_lost_member": 2}


def test_a_turn_in_two_rows_counts_once() -> None:
    first = item("e1", "g1", 9)
    fork = replace(first, input_ids=np.arange(3), attention_mask=np.ones(3, np.int8))
    fork = replace(fork, action_mask=np.array([0, 0, 1], np.int8))
    found = drop_overlong_episodes(batch(first, fork, item("e2", "g2", 3)), 8)
    assert found.meta["dropped"]["overlong"] == 1


@pytest.mark.parametrize("policy", [None, "drop_group"])
def test_what_fits_stays_and_so_does_data_that_was_given(policy: str | None) -> None:
    items = (item("e1", "g1", 8), item("e2", "g1", 8 if policy else 9))
    given = batch(*items, policy=policy)
    found = drop_overlong_episodes(given, 8)
    assert found.items == given.items
    assert found.meta.get("overlong_episodes") == (None if policy is None else 0)
