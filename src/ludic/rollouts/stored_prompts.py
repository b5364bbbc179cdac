"""Prompts without what they repeat, so that a stored rollout grows linearly with its turns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ludic.errors import SerializationError
from ludic.types import AgentStep, Rollout, Step


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout whose prompts lack their beginnings. `shared` says, for each model call that has a
    trace, how many tokens its prompt takes from the call before: prompt, then completion."""

    rollout: Rollout
    shared: tuple[int, ...]


def without_repeats(rollout: Rollout) -> StoredRollout:
    """Cuts from every prompt what it shares with the call before."""
    shared: list[int] = []
    steps: list[Step] = []
    before: tuple[int, ...] = ()
    for step in rollout.steps:
        if isinstance(step, AgentStep) and step.trace is not None:
            prompt = step.trace.prompt_token_ids
            shared.append(_shared_length(before, prompt))
            before = step.trace.token_ids
            step = replace(step, trace=replace(step.trace, prompt_token_ids=prompt[shared[-1] :]))
        steps.append(step)
    return StoredRollout(replace(rollout, steps=tuple(steps)), tuple(shared))


def with_repeats(stored: StoredRollout) -> Rollout:
    """The inverse of `without_repeats`; raises `SerializationError` for impossible counts."""
    traced = [s for s in stored.rollout.agent_steps if s.trace is not None]
    if len(stored.shared) != len(traced):
        raise SerializationError(f"shared has {len(stored.shared)} entries for {len(traced)} calls")
    counts = iter(stored.shared)
    steps: list[Step] = []
    before: tuple[int, ...] = ()
    for step in stored.rollout.steps:
        if isinstance(step, AgentStep) and step.trace is not None:
            count = next(counts)
            if not 0 <= count <= len(before):
                raise SerializationError(
                    f"step {len(steps)}: shared is {count}, and the call before has {len(before)}"
                    " tokens"
                )
            prompt = before[:count] + step.trace.prompt_token_ids
            step = replace(step, trace=replace(step.trace, prompt_token_ids=prompt))
            assert step.trace is not None
            before = step.trace.token_ids
        steps.append(step)
    return replace(stored.rollout, steps=tuple(steps))


def _shared_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
