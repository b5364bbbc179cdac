"""The attempts of a group beside each other, and where they part."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from ludic.rollouts.stored_prompts import shared_length
from ludic.types import EnvironmentStep, Rollout
from ludic.view.folders import RunPlace, ViewError
from ludic.view.queries import members
from ludic.view.rollout_page import read_rollout

MOST_ATTEMPTS = 32
_LONGEST = 20_000


def group_page(run: RunPlace, db: sqlite3.Connection, group: str) -> dict[str, Any]:
    """The attempts with their turns; `parting` is the first turn in which they are not all the
    same, by role."""
    found = members(db, "grp", group, MOST_ATTEMPTS)
    if not found:
        raise ViewError(f"there is no group {group!r} in {run.name}")
    attempts = []
    for row in found:
        rollout = read_rollout(run, db, row["id"])
        attempts.append({**row, "turns_shown": _turns(rollout), "first": _first(rollout)})
    parting: dict[str, int | None] = {}
    for role in dict.fromkeys(row["agent"] for row in found):
        texts = [
            [turn["text"] for turn in attempt["turns_shown"]]
            for attempt in attempts
            if attempt["agent"] == role
        ]
        parting[role] = _parting(texts)
        for attempt in attempts:
            if attempt["agent"] == role:
                _mark_common(attempt["turns_shown"], texts)
    return {"group": group, "attempts": attempts, "parting": parting}


def _turns(rollout: Rollout) -> list[dict[str, Any]]:
    shown = []
    for turn in rollout.turns():
        text = "\n".join(step.message["content"] for step in turn.agent_steps)
        step: EnvironmentStep | None = turn.env_step
        shown.append(
            {
                "turn": turn.index,
                "text": text[:_LONGEST],
                "cut": len(text) > _LONGEST,
                "calls": [
                    call["function"]["name"]
                    for s in turn.agent_steps
                    for call in s.message.get("tool_calls", ())
                ],
                "action": step.action if step else None,
                "parse_error": bool(step and step.info.get("parse_error")),
                "next_obs": step.next_obs[:_LONGEST] if step else None,
                "reward": turn.reward,
                "common": 0,
            }
        )
    return shown


def _first(rollout: Rollout) -> str:
    """What the agent was shown before its first words."""
    for step in rollout.agent_steps:
        users = [m["content"] for m in step.new_messages if m["role"] != "system"]
        return "\n".join(users)[:_LONGEST]
    return ""


def _parting(texts: Sequence[Sequence[str]]) -> int | None:
    for number in range(max(map(len, texts), default=0)):
        if len({each[number] if number < len(each) else None for each in texts}) > 1:
            return number
    return None


def _mark_common(turns: list[dict[str, Any]], texts: Sequence[Sequence[str]]) -> None:
    """Says how many characters of each turn all attempts begin it with, up to where they part."""
    for number, turn in enumerate(turns):
        others = [each[number] for each in texts if number < len(each)]
        turn["common"] = min(shared_length(others[0], other) for other in others)
        if len(set(others)) > 1 or len(others) < len(texts):
            break
