"""Finished groups as the trainer reads them: are they what was asked for, and how old are they?"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ludic.errors import (
    ConfigError,
    NotTrainableError,
    PipelineError,
    SchemaVersionError,
    SerializationError,
)
from ludic.pipeline.messages import Group, Unit, read_group
from ludic.plumbing.records import encode
from ludic.plumbing.text import TRACEBACK
from ludic.rollouts.engine import FailureMonitor as FailureMonitor
from ludic.rollouts.requests import RolloutRequest
from ludic.types import EnvSpec, ProtocolSpec, TokenTrace, to_json

_log = logging.getLogger("ludic.pipeline")
_MOST_NAMED = 5  # causes of failures that are logged for one batch

StalePolicy: TypeAlias = Literal["wait", "drop", "correct"]
"""What keeps samples from being older than `max_lag`. "wait": a unit is asked for only when it can
still be trained on in time, so that actors wait for the trainer. "drop": actors run ahead, and what
is too old is dropped and its prompt put back. "correct": actors run ahead, and what is too old is
trained on all the same, with the importance ratios of the loss and its corrections."""


@dataclass(frozen=True, slots=True)
class BadGroup:
    """A group that cannot be trained on. `reason` is "damaged" (it cannot be read), "malformed" (it
    is not what was asked for) or "refused" (an actor could not read the request)."""

    reason: str
    why: str


@dataclass(slots=True)
class BadGroups:
    """How many bad groups came since the last batch. A few cost their sampling; more than `most`
    end the run, because actors that only send such would keep it waiting for ever."""

    most: int
    count: int = 0

    def note(self, number: int, group: BadGroup) -> None:
        _log.warning("unit %d is %s, and asked for again: %s", number, group.reason, group.why)
        self.count += 1
        if self.count > self.most:
            raise PipelineError(
                f"{self.count} groups came for one batch that cannot be trained on, the last for "
                f"unit {number}, which is {group.reason}: {group.why}. Run actors and trainer with "
                "the same version and the same run file"
            )


def open_groups(unread: Mapping[int, tuple[bytes, Unit]]) -> dict[int, Group | BadGroup]:
    """The groups in messages, by number: for a thread of its own."""
    return {number: open_group(*pair) for number, pair in unread.items()}


def open_group(message: bytes, unit: Unit) -> Group | BadGroup:
    """The group in a message. Raises `SchemaVersionError` for one of a newer version of Ludic: it
    stays where it is, for a trainer that can read it."""
    try:
        group = read_group(message)
    except SchemaVersionError:
        raise
    except SerializationError as exc:
        return BadGroup("damaged", str(exc))
    if group.refused is not None:
        return BadGroup("refused", f"actor {group.actor!r} refuses it: {group.refused}")
    if (fault := next(_faults(group, unit), None)) is not None:
        return BadGroup("malformed", f"actor {group.actor!r} sent {fault}")
    return group


def _faults(group: Group, unit: Unit) -> Iterator[str]:
    """What differs from the unit that was asked for."""
    if group.number != unit.number:
        yield f"group {group.number} for unit {unit.number}"
    expected: dict[str, RolloutRequest] = {
        f"{unit.prefix}/{position}/{number}": request
        for position, request in enumerate(unit.requests)
        for number in range(request.num_episodes)
    }
    ids = {rollout.id for rollout in group.rollouts}
    if len(ids) != len(group.rollouts):
        yield f"{len(group.rollouts)} rollouts with {len(ids)} ids"
    episodes = {rollout.episode_id for rollout in group.rollouts}
    if episodes != expected.keys():
        strange = sorted(episodes - expected.keys())[:1]
        yield f"{len(episodes)} episodes for {len(expected)}" + (
            f", among them {strange[0]!r:.80}" if strange else ""
        )
        return
    for rollout in group.rollouts:
        request = expected[rollout.episode_id]
        if rollout.group_id != request.group_id:
            yield f"rollout {rollout.id!r:.80} of group {rollout.group_id!r:.80}"
        for name in ("env", "protocol"):
            if not _alike(getattr(rollout, name), getattr(request, name)):
                yield f"rollout {rollout.id!r:.80} of another {name}"


def _alike(theirs: EnvSpec | ProtocolSpec | None, ours: EnvSpec | ProtocolSpec) -> bool:
    """Whether they are the same as JSON, which is how both travelled: there a tuple is a list."""
    if theirs == ours and encode(theirs) == encode(ours):  # nearly always, and soon seen
        return True
    return theirs is not None and to_json(theirs) == to_json(ours)


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
    spans = [span for trace in _traces(group) for span in trace.version_spans]
    oldest = min((span.version for span in spans if span.end > span.start), default=version)
    return max(version - oldest, 0)


def _traces(group: Group) -> list[TokenTrace]:
    return [s.trace for r in group.rollouts for s in r.agent_steps if s.trace is not None]


def metrics_of(
    groups: Sequence[Group], lags: Sequence[int], dropped: Mapping[str, int]
) -> dict[str, float]:
    """A batch's ages, what the actors' time went into, on average, and what was dropped for it."""
    times = {"wait": "waited_s", "load": "loaded_s", "sample": "sampled_s"}
    count = max(len(groups), 1)
    return {
        "train/pipeline_lag_max": max(lags, default=0),
        "train/pipeline_lag_mean": sum(lags) / count,
        **{
            f"perf/actor_{name}_s": sum(getattr(group.times, field) for group in groups) / count
            for name, field in times.items()
        },
        **{f"train/pipeline_dropped_{reason}": number for reason, number in dropped.items()},
    }


def count_failures(monitor: FailureMonitor, groups: Sequence[Group]) -> None:
    """Notes the episodes of a batch, those that failed last: it is the batch that is judged, not
    the group that comes first. Raises `RolloutError` where too many failed, on whichever actor."""
    failed: dict[str, tuple[str, str | None]] = {}
    episodes = {rollout.episode_id for group in groups for rollout in group.rollouts}
    for group in groups:
        for rollout in group.rollouts:
            if rollout.error is not None:
                kind = rollout.env and rollout.env.kind
                where = f"unit {group.number} (environment {kind!r}, seed {rollout.env_seed})"
                cause = f"{where}, played by {group.actor!r}: {rollout.error}"
                failed[rollout.episode_id] = (cause, rollout.meta.get(TRACEBACK))
    for _ in range(len(episodes) - len(failed)):
        monitor.record(None)
    causes = Counter(failed.values())
    for (cause, _), count in causes.most_common(_MOST_NAMED):
        _log.warning("%d of a batch's %d episodes failed: %s", count, len(episodes), cause)
    if rest := causes.total() - sum(n for _, n in causes.most_common(_MOST_NAMED)):
        _log.warning("%d more of the batch's episodes failed; their records say why", rest)
    for (cause, trace), count in causes.items():
        for _ in range(count):
            monitor.record(cause, trace)


def judge(group: Group, version: int | None, max_lag: int, stale: StalePolicy) -> str | None:
    """Why a group is too old to be trained on; None if it is not."""
    if lag_of(group, version) <= max_lag:
        return None
    if stale != "correct":
        return "stale"
    if any(trace.completion_logprobs is None for trace in _traces(group)):
        raise NotTrainableError(
            "stale='correct' needs the log-probs that the sampler reported, and group "
            f"{group.number} has none: let the sampler return them, or set stale='drop'"
        )
    return None
