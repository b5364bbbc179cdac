"""How old samples may be, and what happens to those that are older."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from ludic.errors import ConfigError, NotTrainableError
from ludic.pipeline.messages import Group

StalePolicy: TypeAlias = Literal["wait", "drop", "correct"]
"""What keeps samples from being older than `max_lag`. "wait": a unit is asked for only when it can
still be trained on in time, so that actors wait for the trainer. "drop": actors run ahead, and what
is too old is dropped and its prompt put back. "correct": actors run ahead, and what is too old is
trained on all the same, with the importance ratios of the loss and its corrections."""


def check_staleness(max_lag: int, stale: StalePolicy) -> None:
    """Raises for settings that no batch could fulfil."""
    if stale not in get_args(StalePolicy):
        raise ConfigError(f"stale={stale!r}: must be one of {get_args(StalePolicy)}")
    if max_lag < 0 or (max_lag == 0 and stale != "wait"):
        raise ConfigError(
            f"max_lag={max_lag} with stale={stale!r}: must be at least 1; 0 is for stale='wait', "
            "where actors then only work while the trainer waits"
        )


def lag_of(group: Group, version: int | None) -> int:
    """How many versions the group's oldest token is behind `version`; a newer one, of a trainer
    that was lost, counts as not behind at all."""
    if version is None:
        return 0
    versions = (
        span.version
        for rollout in group.rollouts
        for step in rollout.agent_steps
        if step.trace is not None
        for span in step.trace.version_spans
        if span.end > span.start
    )
    return max(version - min(versions, default=version), 0)


def judge(group: Group, version: int | None, max_lag: int, stale: StalePolicy) -> str | None:
    """Why a group is too old to be trained on; None if it is not."""
    if lag_of(group, version) <= max_lag:
        return None
    if stale != "correct":
        return "stale"
    for rollout in group.rollouts:
        for step in rollout.agent_steps:
            if step.trace is not None and step.trace.completion_logprobs is None:
                raise NotTrainableError(
                    "stale='correct' needs the log-probs that the sampler reported, and group "
                    f"{group.number} has none: let the sampler return them, or set stale='drop'"
                )
    return None
