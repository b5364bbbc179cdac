"""Groups of rollouts: what happens to a group that lost a member, and groups per role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

from ludic.types import Rollout

LostMember: TypeAlias = Literal["drop_group", "keep_partial"]
"""What happens to a group in which an episode failed: either it is dropped, because its baseline
would not be the intended one, or the remaining members are used."""


def settle_groups(
    rollouts: Sequence[Rollout], lost_member: LostMember, drops: Counter[str]
) -> list[Rollout]:
    """The rollouts that may get credit. Failed ones are left out ("rollout_error") and, under
    "drop_group", the others of their group too ("group_lost_member"); both are counted in turns."""
    broken = {r.group_id for r in rollouts if r.error is not None and r.group_id is not None}
    kept = []
    for rollout in rollouts:
        if rollout.error is not None:
            reason = "rollout_error"
        elif rollout.group_id in broken and lost_member == "drop_group":
            reason = "group_lost_member"
        else:
            kept.append(rollout)
            continue
        drops[reason] += len({step.turn_index for step in rollout.agent_steps})
    return kept


def group_by_role(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The same rollouts with `group_id` narrowed to the agent's role, so that in an environment
    with several agents each is compared only with those in the same role."""
    return [
        r if r.group_id is None else r.labelled(group_id=f"{r.group_id}/{r.agent_id}")
        for r in rollouts
    ]
