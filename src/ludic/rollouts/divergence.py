"""Where two recordings of one episode first differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ludic.rollouts.stored_prompts import shared_length
from ludic.types import AgentStep, EnvironmentStep, Rollout, Step, TruncationReason

_OUTSIDE = {
    TruncationReason.CONTEXT_WINDOW,
    TruncationReason.DEADLINE,
    TruncationReason.ERROR,
}
"""Endings that come from a backend or a clock: the record ends there, and so may the replay."""

_PER_TOKEN = ("prompt_token_ids", "completion_token_ids", "completion_logprobs")


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place at which the replay differs: `field` of step `step` of a rollout, and for
    token ids and log-probs the position `token` within it."""

    rollout_id: str
    step: int
    field: str
    recorded: Any
    replayed: Any
    token: int | None = None

    def __str__(self) -> str:
        at = "" if self.token is None else f", token {self.token}"
        was, now = _shortened(repr(self.recorded), repr(self.replayed))
        return (
            f"rollout {self.rollout_id!r}, step {self.step}{at}: {self.field} was {was} and is "
            f"now {now}"
        )


def first_divergence(
    recorded: Rollout, replayed: Rollout, *, with_tokens: bool
) -> tuple[Divergence | None, int, int]:
    """The first divergence of one rollout, and how many steps and sampled tokens agree."""
    tokens = 0
    ended_outside = recorded.error is not None or recorded.truncation_reason in _OUTSIDE
    for index, old in enumerate(recorded.steps):
        if index >= len(replayed.steps):
            cause = replayed.error or "ended"
            return Divergence(recorded.id, index, "step", old.kind, cause), index, tokens
        last = index + 1 == len(recorded.steps)
        cut_outside = isinstance(old, EnvironmentStep) and old.truncation_reason in _OUTSIDE
        ending = not (last and cut_outside)
        facts = (_facts(s, with_tokens, ending) for s in (old, replayed.steps[index]))
        # The lists of facts stay in step: what decides the next entries is itself compared.
        for (name, before), (_, after) in zip(*facts, strict=False):
            if not _same(name, before, after):
                return _divergence(recorded.id, index, name, before, after), index, tokens
        if isinstance(old, AgentStep) and old.trace is not None:
            tokens += len(old.trace.completion_token_ids)
    count = len(recorded.steps)
    if len(replayed.steps) > count and not ended_outside:
        more = replayed.steps[count].kind
        return Divergence(recorded.id, count, "step", "ended", more), count, tokens
    return None, count, tokens


def _facts(step: Step, with_tokens: bool, ending: bool) -> Iterator[tuple[str, Any]]:
    """What is compared of a step, in order, by name."""
    yield from _named(step, "kind", "turn_index")
    if isinstance(step, AgentStep):
        yield from _named(step, "new_messages")
        if with_tokens:
            yield "trace", step.trace is not None
            if step.trace is not None:
                yield from _named(step.trace, *_PER_TOKEN)
        yield from _named(step, "message", "finish_reason", "tool_messages")
        return
    yield from _named(step, "stepped", "obs", "action", "next_obs", "reward", "terminated")
    if ending:
        yield from _named(step, "truncated", "truncation_reason")
        yield "keys of info", sorted(step.info)
        yield from ((f"info[{key!r}]", step.info[key]) for key in sorted(step.info))


def _named(owner: Any, *names: str) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(owner, name)) for name in names)


def _same(name: str, before: Any, after: Any) -> bool:
    if name.startswith("info["):  # as JSON: NaN equals itself, and true is not 1
        return json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)
    return bool(before == after or (before != before and after != after))


def _divergence(rollout_id: str, step: int, name: str, before: Any, after: Any) -> Divergence:
    if name not in _PER_TOKEN or before is None or after is None:
        return Divergence(rollout_id, step, name, before, after)
    at = shared_length(before, after)
    was, now = (ids[at] if at < len(ids) else None for ids in (before, after))
    return Divergence(rollout_id, step, name, was, now, token=at)


def _shortened(a: str, b: str, limit: int = 160) -> tuple[str, str]:
    """Both texts; long ones from shortly before the first character that differs."""
    if max(len(a), len(b)) <= limit:
        return a, b
    start = max(shared_length(a, b) - 20, 0)

    def part(text: str) -> str:
        after = "…" if len(text) > start + limit else ""
        return ("…" if start else "") + text[start : start + limit] + after

    return part(a), part(b)
