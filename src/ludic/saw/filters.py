"""Filters: which turns are left out of training, and why.

A filter looks at one sample (a turn of a rollout, with its weight) and returns a reason to drop it,
or None to keep it. Filters run after credit is assigned, so that they change no baseline, and
before turns are merged, so that merging changes nothing: the tokens of a dropped turn stay in the
later turns' state. Every drop is counted by its reason in the batch's `meta["dropped"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from ludic.errors import ConfigError
from ludic.types import FinishReason, Rollout, TruncationReason, Turn


@dataclass(frozen=True, slots=True)
class Sample:
    """What a filter judges: one turn of a rollout, with the weight that credit gave it."""

    rollout: Rollout
    turn: Turn
    weight: float

    @property
    def length(self) -> int:
        """Tokens of the turn's longest model call, including its prompt: its length as a separate
        row."""
        traces = (step.trace for step in self.turn.agent_steps)
        return max(
            (len(t.prompt_token_ids) + len(t.completion_token_ids) for t in traces if t), default=0
        )


SampleFilter: TypeAlias = Callable[[Sample], str | None]
"""The reason to drop a sample, or None to keep it."""


def drop_if(reason: str, predicate: Callable[[Sample], bool]) -> SampleFilter:
    """A custom filter: drops the samples for which `predicate` is true.

    >>> no_zero_weights = drop_if("zero_weight", lambda sample: sample.weight == 0.0)
    """

    def judge(sample: Sample) -> str | None:
        return reason if predicate(sample) else None

    return judge


def drop_truncated(reasons: Collection[TruncationReason] | None = None) -> SampleFilter:
    """Drops every turn of an episode that a limit cut short (for one of `reasons`, if given)."""

    def cut(sample: Sample) -> bool:
        rollout = sample.rollout
        return rollout.truncated and (reasons is None or rollout.truncation_reason in reasons)

    return drop_if("truncated", cut)


def drop_incomplete_completions() -> SampleFilter:
    """Drops turns with a model call that did not end by itself (cut by length, or aborted)."""
    return drop_if(
        "incomplete_completion",
        lambda s: any(c.finish_reason is not FinishReason.STOP for c in s.turn.agent_steps),
    )


def drop_parse_errors() -> SampleFilter:
    """Drops turns whose answer could not be parsed into an action."""
    return drop_if(
        "parse_error",
        lambda s: s.turn.env_step is not None and bool(s.turn.env_step.info.get("parse_error")),
    )


def drop_compactions() -> SampleFilter:
    """Drops the summaries by which dialogues were compacted."""
    return drop_if("compaction", lambda s: s.turn.compacted)


def drop_overlong(max_seq_len: int) -> SampleFilter:
    """Drops turns whose prompt and completion together exceed `max_seq_len` tokens."""
    if max_seq_len < 1:
        raise ConfigError(f"drop_overlong(max_seq_len={max_seq_len}): must be at least 1")
    return drop_if("overlong", lambda s: s.length > max_seq_len)


def combine(*filters: SampleFilter) -> SampleFilter:
    """Applies all filters in order; a sample is counted under the first reason that applies."""

    def judge(sample: Sample) -> str | None:
        return next((reason for f in filters if (reason := f(sample)) is not None), None)

    return judge
