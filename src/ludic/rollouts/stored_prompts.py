"""Prompts without what they repeat, so that a stored rollout grows linearly with its turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ludic.errors import SerializationError
from ludic.plumbing.records import Record, changed
from ludic.types import AgentStep, Rollout, TokenTrace


class StoredRollout(Record, frozen=True):
    """A rollout whose prompts lack their beginnings. `shared` says, for each model call that has a
    trace, how many tokens its prompt takes from the call before: prompt, then completion."""

    rollout: Rollout
    shared: tuple[int, ...]


def without_repeats(rollout: Rollout) -> StoredRollout:
    """Cuts from every prompt what it shares with the call before."""
    steps = list(rollout.steps)
    shared: list[int] = []
    before: TokenTrace | None = None
    for at, step in enumerate(steps):
        if not isinstance(step, AgentStep) or step.trace is None:
            continue
        trace = step.trace
        count = 0 if before is None else _shared_with(before, trace)
        if count:
            rest = changed(trace, prompt_token_ids=trace.prompt_token_ids[count:])
            steps[at] = changed(step, trace=rest)
        shared.append(count)
        before = trace
    kept = changed(rollout, steps=tuple(steps)) if any(shared) else rollout
    return StoredRollout(kept, tuple(shared))


def with_repeats(stored: StoredRollout) -> Rollout:
    """The inverse of `without_repeats`; raises `SerializationError` for impossible counts."""
    traces = [step.trace for step in stored.rollout.agent_steps if step.trace is not None]
    calls = [(trace.prompt_token_ids, trace.completion_token_ids) for trace in traces]
    prompts = iter(whole_prompts(calls, stored.shared))
    if not any(stored.shared):
        return stored.rollout
    return with_traces(
        stored.rollout, lambda trace: trace and changed(trace, prompt_token_ids=next(prompts))
    )


def whole_prompts(
    calls: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shared: Sequence[int]
) -> list[tuple[int, ...]]:
    """The prompts of calls of which the stored part of the prompt, and the completion, are given;
    raises `SerializationError` for impossible counts."""
    if len(shared) != len(calls):
        raise SerializationError(f"shared has {len(shared)} entries for {len(calls)} calls")
    if not any(shared):
        return [prompt for prompt, _ in calls]
    prompts: list[tuple[int, ...]] = []
    before: tuple[int, ...] = ()
    for number, ((prompt, completion), count) in enumerate(zip(calls, shared, strict=True)):
        if not 0 <= count <= len(before):
            raise SerializationError(
                f"call {number}: shared is {count}, but the call before it has {len(before)} tokens"
            )
        prompts.append(before[:count] + prompt if count else prompt)
        before = prompts[-1] + completion
    return prompts


def _shared_with(before: TokenTrace, trace: TokenTrace) -> int:
    if trace.extends(before):
        return len(before.prompt_token_ids) + len(before.completion_token_ids)
    return shared_length(before.token_ids, trace.prompt_token_ids)


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How long two sequences are the same from their beginning."""
    n = min(len(a), len(b))
    return n if a[:n] == b[:n] else next(i for i in range(n) if a[i] != b[i])


def with_traces(
    rollout: Rollout, change: Callable[[TokenTrace | None], TokenTrace | None]
) -> Rollout:
    """The rollout with what `change` makes of the trace of each model call, in order."""
    return rollout.labelled(
        steps=tuple(
            [
                changed(step, trace=change(step.trace)) if isinstance(step, AgentStep) else step
                for step in rollout.steps
            ]
        )
    )
