"""From rollouts and credit to training sequences: concatenating calls, merging turns.

A *row* is one sequence of tokens. A model call joins a row if its prompt begins with all the tokens
of that row, including the sampled ones; the tokens in between (tool results, observations) are
state. The row's tokens are then those of its last call, and its action mask has one span per call.
A call that extends no row starts a new one: that is a fork.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic.errors import CreditError, NotTrainableError
from ludic.frozen import quick
from ludic.saw.filters import Sample, SampleFilter
from ludic.saw.items import SampleAttachments, SAWItem, TurnSpan
from ludic.saw.trainable import check_sampling
from ludic.types import AgentStep, Rollout, RolloutStepKey, TokenTrace

UNKNOWN_VERSION = -1
"""The value in `SampleAttachments.versions` of a token whose policy version was not recorded."""


@quick
@dataclass(frozen=True, slots=True)
class _Call:
    """One model call that is trained on."""

    trace: TokenTrace
    turn_index: int
    weight: float
    temperature: float

    def continues(self, last: _Call) -> bool:
        """Whether this call can follow `last` in one row."""
        return (
            self.temperature == last.temperature
            and (self.trace.completion_logprobs is None) == (last.trace.completion_logprobs is None)
            and self.trace.extends(last.trace)
        )


def build_items(
    rollouts: Sequence[Rollout],
    credit: Mapping[RolloutStepKey, float],
    *,
    merge: bool = True,
    sample_filter: SampleFilter | None = None,
    drops: Counter[str] | None = None,
) -> list[SAWItem]:
    """Every turn that has credit, as training sequences in the order of the rollouts.

    All model calls of a turn become one sample. With `merge`, turns whose prompts extend each other
    share a row; without it, each turn has its own row. A call that does not extend a row forks.
    Turns of failed rollouts ("rollout_error"), without credit ("no_credit"), without a sampled
    token ("no_tokens") or that the filter drops are left out and counted, in turns, in `drops`.

    Raises `CreditError` for a weight that is not finite, and `NotTrainableError` for a call
    without token ids or with sampling settings that cannot be trained on.
    """
    drops = Counter() if drops is None else drops
    items: list[SAWItem] = []
    for rollout in rollouts:
        meta = _item_meta(rollout)
        rows: list[list[_Call]] = []
        for calls in _trained_turns(rollout, credit, sample_filter, drops):
            rows.extend(_extend_rows(rows if merge else (), calls))
        items.extend([_make_item(row, rollout, meta) for row in rows])
    return items


def _trained_turns(
    rollout: Rollout,
    credit: Mapping[RolloutStepKey, float],
    sample_filter: SampleFilter | None,
    drops: Counter[str],
) -> Iterator[list[_Call]]:
    """The calls of each turn that is trained on; the other turns are counted."""
    for turn in rollout.turns():
        if not turn.agent_steps:
            continue
        if rollout.error is not None:
            drops["rollout_error"] += 1
            continue
        weight = credit.get((rollout.id, turn.index))
        if weight is None:
            drops["no_credit"] += 1
            continue
        if not math.isfinite(weight):
            raise CreditError(
                f"rollout {rollout.id!r}, turn {turn.index}: the weight is {weight}; "
                "credit must be finite (look for a reward that is not, or a division by zero)"
            )
        if sample_filter is not None:
            reason = sample_filter(Sample(rollout, turn, weight))
            if reason is not None:
                drops[reason] += 1
                continue
        calls = [_make_call(rollout, step, weight) for step in turn.agent_steps]
        calls = [call for call in calls if call.trace.completion_token_ids]
        if calls:
            yield calls
        else:
            drops["no_tokens"] += 1


def _make_call(rollout: Rollout, step: AgentStep, weight: float) -> _Call:
    if step.trace is None:
        raise NotTrainableError(
            f"rollout {rollout.id!r}, turn {step.turn_index}: the backend returned no token ids; "
            "use a client that returns them, or leave the rollout out"
        )
    if step.sampling:
        check_sampling(
            step.sampling,
            kept_ids_recorded=step.trace.kept_token_ids is not None,
            where=f"rollout {rollout.id!r}, turn {step.turn_index}",
        )
    return _Call(step.trace, step.turn_index, weight, step.sampling.get("temperature", 1.0))


def _extend_rows(rows: Sequence[list[_Call]], calls: Sequence[_Call]) -> list[list[_Call]]:
    """Appends each call to the newest row that it continues; returns the rows it had to start."""
    opened: list[list[_Call]] = []
    for call in calls:
        for row in (*reversed(opened), *reversed(rows)):
            if call.continues(row[-1]):
                row.append(call)
                break
        else:
            opened.append([call])
    return opened


def _item_meta(rollout: Rollout) -> Mapping[str, Any]:
    return {
        **rollout.meta,
        "agent_id": rollout.agent_id,
        "episode_id": rollout.episode_id,
        "task_key": rollout.task_key,
        "env": rollout.env.kind if rollout.env else None,
        "total_reward": rollout.total_reward,
    }


def _make_item(row: Sequence[_Call], rollout: Rollout, meta: Mapping[str, Any]) -> SAWItem:
    input_ids = np.array(row[-1].trace.token_ids, dtype=np.int64)
    attention_mask = np.empty(input_ids.size, dtype=np.int8)
    attention_mask.fill(1)
    action_mask = np.zeros(input_ids.size, dtype=np.int8)
    logprobs: list[float] = []
    versions: list[int] = []
    known = False
    spans: list[TurnSpan] = []
    end = 0
    for call in row:
        trace = call.trace
        start, count = len(trace.prompt_token_ids), len(trace.completion_token_ids)
        action_mask[start : start + count] = 1
        logprobs += trace.completion_logprobs or ()
        versions += _versions(trace)
        known = known or bool(trace.version_spans)
        begin, end = end, end + count
        if spans and spans[-1].turn_index == call.turn_index:
            begin = spans.pop().start
        spans.append(TurnSpan(begin, end, call.turn_index, call.weight))
    one_weight = len(spans) == 1
    return SAWItem(
        input_ids=input_ids,
        attention_mask=attention_mask,
        action_mask=action_mask,
        weight=spans[0].weight if one_weight else math.nan,
        meta=meta,
        attachments=SampleAttachments(
            # All calls of a row have log-probs, or none has.
            behavior_logprobs=np.array(logprobs, dtype=np.float32) if logprobs else None,
            token_weights=None if one_weight else _token_weights(spans),
            versions=np.array(versions, dtype=np.int64) if known else None,
            kept_token_ids=_kept_ids(row),
        ),
        turns=tuple(spans),
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        temperature=float(row[0].temperature),
    )


def _versions(trace: TokenTrace) -> list[int]:
    """The policy version of every sampled token."""
    if not trace.version_spans:
        return [UNKNOWN_VERSION] * len(trace.completion_token_ids)
    versions: list[int] = []
    for span in trace.version_spans:
        versions += [span.version] * (span.end - span.start)
    return versions


def _token_weights(spans: Sequence[TurnSpan]) -> NDArray[np.float32]:
    weights = np.array([span.weight for span in spans], dtype=np.float32)
    return np.repeat(weights, [span.end - span.start for span in spans])


def _kept_ids(row: Sequence[_Call]) -> tuple[NDArray[np.int64], ...] | None:
    if all(call.trace.kept_token_ids is None for call in row):
        return None
    everything = np.empty(0, dtype=np.int64)
    kept: list[NDArray[np.int64]] = []
    for call in row:
        if call.trace.kept_token_ids is None:
            kept.extend([everything] * len(call.trace.completion_token_ids))
        else:
            kept.extend(np.array(ids, dtype=np.int64) for ids in call.trace.kept_token_ids)
    return tuple(kept)
