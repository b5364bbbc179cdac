"""From a stored line to the few columns that the table of rollouts needs."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

from ludic.rollouts.storage import SCHEMA
from ludic.rollouts.token_log import SCHEMA as TOKEN_SCHEMA

_LONGEST_TEXT = 100_000
_SAID = 120
_STEP = re.compile(r"step-(\d+)")


class _Message(msgspec.Struct):
    content: str | None = None


class _Row(msgspec.Struct):
    schema: int
    id: str = ""
    episode_id: str = ""
    agent_id: str = ""
    group_id: str = ""
    task_key: str = ""
    parent_id: str = ""
    env: str = ""
    total_reward: float | None = None
    num_turns: int = 0
    num_tokens: int = 0
    terminated: bool = False
    truncated: bool = False
    truncation_reason: str = ""
    error: str = ""
    messages: list[_Message] = []
    rollout: str = ""


class _Info(msgspec.Struct):
    result: Any = None
    parse_error: Any = None


class _Step(msgspec.Struct):
    kind: str = ""
    message: _Message | None = None
    fork: dict[str, Any] | None = None
    finish_reason: str = ""
    reward_components: dict[str, float] | None = None
    info: _Info = msgspec.field(default_factory=_Info)
    next_obs: str = ""
    tool_messages: list[_Message] = []


class _Rollout(msgspec.Struct):
    steps: list[_Step] = []


class _Stored(msgspec.Struct):
    rollout: _Rollout


class _Trained(msgspec.Struct):
    schema: int
    update: int
    rollout: str
    turns: list[tuple[int, float, int]]


COLUMNS = (
    *("id", "episode", "agent", "grp", "task", "parent", "env", "upd", "reward", "turns"),
    *("tokens", "terminated", "truncated", "truncation", "error", "outcome", "components"),
    *("parse_failures", "forks", "cut", "tools", "said"),
)


class NewerSchemaError(ValueError):
    """A line that a newer version of Ludic wrote."""


_decode_row = msgspec.json.Decoder(_Row).decode
_decode_stored = msgspec.json.Decoder(_Stored).decode
_decode_rollout = msgspec.json.Decoder(_Rollout).decode
_decode_trained = msgspec.json.Decoder(_Trained).decode


def rollout_columns(line: bytes) -> tuple[tuple[Any, ...], str]:
    """The values of `COLUMNS`, and the text to search in. Raises `ValueError` (msgspec's errors
    are) for a line that is not a rollout."""
    row = _decode(_decode_row, _Row, line)
    if row.schema > SCHEMA:
        raise NewerSchemaError(f"rollouts of schema {row.schema}, newer than {SCHEMA}")
    if row.schema < 2:
        steps = _decode(_decode_rollout, _Rollout, row.rollout).steps
    else:
        steps = _decode(_decode_stored, _Stored, row.rollout).rollout.steps
    components: dict[str, float] = {}
    outcome, last_obs, first_words = None, "", ""
    failures = forks = cut = tools = 0
    for step in steps:
        if step.kind == "agent":
            forks += step.fork is not None
            cut += step.finish_reason == "length"
            tools += len(step.tool_messages)
            first_words = first_words or beginning((step.message and step.message.content) or "")
            continue
        for name, value in (step.reward_components or {}).items():
            components[name] = components.get(name, 0.0) + value
        failures += bool(step.info.parse_error)
        outcome, last_obs = step.info.result, step.next_obs
    numbered = _STEP.match(row.episode_id)
    finite = {k: v for k, v in components.items() if math.isfinite(v)}
    values = (
        *(row.id, row.episode_id, row.agent_id, row.group_id, row.task_key, row.parent_id),
        *(row.env, int(numbered[1]) + 1 if numbered else None, row.total_reward, row.num_turns),
        *(row.num_tokens, row.terminated, row.truncated, row.truncation_reason, row.error),
        None if outcome is None else str(outcome)[:200],
        json.dumps(finite) if finite else None,
        *(failures, forks, cut, tools, first_words),
    )
    text = "\n".join([*(message.content or "" for message in row.messages), last_obs, row.error])
    if len(text) > _LONGEST_TEXT:
        text = text[: _LONGEST_TEXT // 2] + "\n" + text[-_LONGEST_TEXT // 2 :]
    return values, text


def beginning(text: str) -> str:
    """The first words of a text, on one line."""
    line = " ".join(text[: 4 * _SAID].split())
    return line if len(line) <= _SAID and len(text) <= 4 * _SAID else f"{line[:_SAID].rstrip()}…"


def trained_columns(line: bytes) -> tuple[str, int, float, int]:
    """The rollout, update, mean weight and number of tokens of a line of a token log."""
    row = _decode_trained(line)
    if row.schema > TOKEN_SCHEMA:
        raise NewerSchemaError(f"token records of schema {row.schema}, newer than {TOKEN_SCHEMA}")
    tokens = sum(count for *_, count in row.turns)
    weight = sum(weight * count for _, weight, count in row.turns) / max(tokens, 1)
    return row.rollout, row.update, weight, tokens


def _decode(decode: Any, kind: Any, text: bytes | str) -> Any:
    try:
        return decode(text)
    except msgspec.DecodeError as exc:
        if isinstance(exc, msgspec.ValidationError):
            raise
        # NaN and infinities, which only Python's reader takes.
        return msgspec.convert(json.loads(text), kind, strict=False)
