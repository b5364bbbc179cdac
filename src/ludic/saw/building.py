"""From rollouts and credit to a batch of training sequences, the same way for every source; and the
contract of credit: how much each turn of each rollout is worth.

A *row* is one sequence of tokens. A model call joins a row if its prompt begins with all the tokens
of that row, including the sampled ones; the tokens in between (tool results, observations) are
state. The row's tokens are then those of its last call, and its action mask has one span per call.
A call that extends no row starts a new one: that is a fork.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ludic.errors import BatchError, CreditError, NotTrainableError
from ludic.plumbing.records import Numbers
from ludic.saw.batch import make_batch
from ludic.saw.filters import Sample, SampleFilter
from ludic.saw.items import UNKNOWN_VERSION, SampleAttachments, SAWBatch, SAWItem, TurnSpan
from ludic.saw.statistics import item_statistics, rollout_statistics
from ludic.saw.trainable import check_sampling
from ludic.types import AgentStep, Rollout, RolloutStepKey, TokenTrace, VersionSpan

N = TypeVar("N", np.int64, np.float32)


class CreditAssigner(Protocol):
    """Gives every turn of every rollout its weight.

    One that remembers earlier batches is also `Stateful`; its `compute` is called once per batch.
    """

    def compute(self, rollouts: Sequence[Rollout]) -> Mapping[RolloutStepKey, float]: ...


@runtime_checkable
class ComparesGroups(Protocol):
    """Credit that compares the `group_size` rollouts of a group with each other."""

    @property
    def group_size(self) -> int: ...


@runtime_checkable
class AllowsPartialGroups(Protocol):
    """Credit that can also compare what is left of a group which lost a member."""

    def with_partial_groups(self) -> CreditAssigner:
        """Returns this credit for groups of at most `group_size`."""


@runtime_checkable
class WatchesDrift(Protocol):
    """Credit that forgets as the policy moves.

    While `watches_drift` is true, the trainer measures every update and reports its KL per token.
    """

    @property
    def watches_drift(self) -> bool: ...

    def observe_drift(self, kl: float) -> None: ...


class Algorithm(Protocol):
    """The part of an algorithm that making a batch needs: `RLAlgorithm`, or any object with
    credit."""

    @property
    def credit_assigner(self) -> CreditAssigner: ...


def batch_from_rollouts(
    rollouts: Sequence[Rollout],
    credit_assigner: CreditAssigner,
    *,
    sample_filter: SampleFilter | None = None,
    merge: bool = True,
    lost_member: LostMember = "drop_group",
    drops: Mapping[str, int] | None = None,
    meta: Mapping[str, Any] | None = None,
    sampled: Sequence[Rollout] | None = None,
) -> SAWBatch:
    """Settles groups, assigns credit, filters, merges and counts.

    Groups are per role: the credit assigner sees each `group_id` with the agent's role added.
    `drops` are earlier drops, by reason, to add; the batch's `meta["dropped"]` has all of them, in
    turns. `sampled` are the rollouts that the statistics are about, where they are others. The
    algorithm's preprocess is not applied here: the trainer applies it, once, to every batch.
    """
    dropped: Counter[str] = Counter(drops or {})
    kept = group_by_role(settle_groups(rollouts, lost_member, dropped))
    credit = credit_assigner.compute(kept) if kept else {}
    _check_turns(kept, credit)
    items = build_items(kept, credit, merge=merge, sample_filter=sample_filter, drops=dropped)
    return make_batch(
        items,
        {
            **rollout_statistics(rollouts if sampled is None else sampled),
            **item_statistics(items),
            "dropped": dict(dropped),
            **(meta or {}),
        },
    )


def _check_turns(rollouts: Sequence[Rollout], credit: Mapping[RolloutStepKey, float]) -> None:
    turns = {r.id: {step.turn_index for step in r.steps} for r in rollouts}
    for name, index in credit:
        if name in turns and index not in turns[name]:
            raise CreditError(
                f"there is credit for turn {index} of rollout {name!r}, whose turns are "
                f"{sorted(turns[name])}: credit goes to turns (`step.turn_index`), and a turn may "
                "have several steps"
            )


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


class _Call(NamedTuple):
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


class _Row(NamedTuple):
    """The calls that become one item."""

    rollout: Rollout
    meta: Mapping[str, Any]
    calls: list[_Call]


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

    Raises `CreditError` for a weight that is not finite, `NotTrainableError` for a call without
    token ids or with sampling settings that cannot be trained on, and `BatchError` for two rollouts
    of one id: credit is by id.
    """
    drops = Counter() if drops is None else drops
    found: list[_Row] = []
    named: dict[str, Rollout] = {}
    for rollout in rollouts:
        other = named.setdefault(rollout.id, rollout)
        if other is not rollout and other != rollout:
            raise BatchError(
                f"two rollouts have the id {rollout.id!r}, as those of two runs may, and one would "
                "get the other's credit: rename one, rollout.labelled(id=...)"
            )
        rows: list[list[_Call]] = []
        for calls in _trained_turns(rollout, credit, sample_filter, drops):
            first = 0 if merge else len(rows)
            for call in calls:  # joins the newest row that it continues
                row = next((r for r in reversed(rows[first:]) if call.continues(r[-1])), [])
                if not row:
                    rows.append(row)
                row.append(call)
        if rows:
            meta = _item_meta(rollout)
            found.extend([_Row(rollout, meta, row) for row in rows])
    return _make_items(found)


def _trained_turns(
    rollout: Rollout,
    credit: Mapping[RolloutStepKey, float],
    sample_filter: SampleFilter | None,
    drops: Counter[str],
) -> Iterator[list[_Call]]:
    """The calls of each turn that is trained on; the other turns are counted."""
    steps: dict[int, list[AgentStep]] = {}
    for step in rollout.steps:
        if isinstance(step, AgentStep):
            steps.setdefault(step.turn_index, []).append(step)
    if rollout.error is not None:
        drops.update(["rollout_error"] * len(steps))
        return
    turns = {} if sample_filter is None else {turn.index: turn for turn in rollout.turns()}
    for index in sorted(steps):
        weight = credit.get((rollout.id, index))
        if weight is None:
            drops["no_credit"] += 1
            continue
        if not math.isfinite(weight):
            raise CreditError(
                f"rollout {rollout.id!r}, turn {index}: the weight is {weight}; "
                "credit must be finite (look for a reward that is not, or a division by zero)"
            )
        if sample_filter is not None:
            reason = sample_filter(Sample(rollout, turns[index], weight))
            if reason is not None:
                drops[reason] += 1
                continue
        found = [_make_call(rollout, step, weight) for step in steps[index]]
        if calls := [call for call in found if call.trace.completion_token_ids]:
            yield calls
        else:
            drops["no_tokens"] += 1


def _make_call(rollout: Rollout, step: AgentStep, weight: float) -> _Call:
    where = f"rollout {rollout.id!r}, turn {step.turn_index}"
    if step.trace is None:
        raise NotTrainableError(
            f"{where}: the backend returned no token ids; use a client that returns them, or leave "
            "the rollout out"
        )
    kept = step.trace.kept_token_ids is not None
    check_sampling(step.sampling, kept_ids_recorded=kept, where=where)
    return _Call(step.trace, step.turn_index, weight, step.sampling.get("temperature", 1.0))


def _item_meta(rollout: Rollout) -> Mapping[str, Any]:
    return {
        **rollout.meta,
        "agent_id": rollout.agent_id,
        "episode_id": rollout.episode_id,
        "task_key": rollout.task_key,
        "env": rollout.env.kind if rollout.env else None,
        "total_reward": rollout.total_reward,
    }


def _make_items(rows: Sequence[_Row]) -> list[SAWItem]:
    """The rows as items. Their arrays are parts of arrays over all rows: one of few tokens costs
    much more to make than to fill."""
    last = [row.calls[-1].trace for row in rows]
    parts = [ids for trace in last for ids in (trace.prompt_token_ids, trace.completion_token_ids)]
    input_ids = _joined(parts, np.int64)
    traces = [call.trace for row in rows for call in row.calls]
    logprobs = _joined(
        [t.completion_logprobs for t in traces if t.completion_logprobs is not None], np.float32
    )
    version_spans = [span for trace in traces for span in _version_spans(trace)]
    versions = _by_token([span.version for span in version_spans], version_spans, np.int64)
    runs: list[int] = []  # of tokens: states and actions by turns
    spans: list[list[TurnSpan]] = []
    bounds = [0]  # of the rows
    for row in rows:
        at, end, own = 0, 0, list[TurnSpan]()
        for call in row.calls:
            state, actions = len(call.trace.prompt_token_ids), len(call.trace.completion_token_ids)
            runs += (state - at, actions)
            at = state + actions
            begin, end = end, end + actions
            if own and own[-1].turn_index == call.turn_index:
                begin = own.pop().start
            own.append(TurnSpan(begin, end, call.turn_index, call.weight))
        spans.append(own)
        bounds.append(bounds[-1] + at)
    action_mask = np.repeat(
        np.tile(np.array([0, 1], np.int8), len(runs) // 2), np.array(runs, np.int64)
    )
    attention_mask = np.ones(len(input_ids), np.int8)
    turns = list(chain.from_iterable(spans))
    weights = _by_token([span.weight for span in turns], turns, np.float32)
    items: list[SAWItem] = []
    token = logged = 0  # where the row's actions and its log-probs begin
    for row, own, (at, end) in zip(rows, spans, pairwise(bounds), strict=True):
        actions, calls = own[-1].end, row.calls
        one_weight = len(own) == 1
        # All calls of a row have log-probs, or none has.
        has_logprobs = calls[0].trace.completion_logprobs is not None
        versioned = any(call.trace.version_spans for call in calls)
        attachments = SampleAttachments(
            behavior_logprobs=logprobs[logged : logged + actions] if has_logprobs else None,
            token_weights=None if one_weight else weights[token : token + actions],
            versions=versions[token : token + actions] if versioned else None,
            kept_token_ids=_kept_ids(calls),
        )
        items.append(
            SAWItem(
                input_ids=input_ids[at:end],
                attention_mask=attention_mask[at:end],
                action_mask=action_mask[at:end],
                weight=own[0].weight if one_weight else math.nan,
                meta=row.meta,
                attachments=attachments,
                turns=tuple(own),
                rollout_id=row.rollout.id,
                group_id=row.rollout.group_id,
                temperature=float(calls[0].temperature),
            )
        )
        token += actions
        logged += actions if has_logprobs else 0
    return items


def _joined(parts: Sequence[Sequence[float]], dtype: type[N]) -> NDArray[N]:
    """All their numbers, end to end."""
    arrays = [part.array for part in parts if type(part) is Numbers]
    if arrays and len(arrays) == len(parts):
        return np.concatenate(arrays, dtype=dtype, casting="same_kind")
    return np.fromiter(chain.from_iterable(parts), dtype, sum(map(len, parts)))


def _version_spans(trace: TokenTrace) -> Sequence[VersionSpan]:
    """The trace's spans; where nothing is known, one for all its tokens that says so."""
    length = len(trace.completion_token_ids)
    return trace.version_spans or (VersionSpan(0, length, UNKNOWN_VERSION),)


def _by_token(
    values: Sequence[float], spans: Sequence[TurnSpan | VersionSpan], dtype: type[N]
) -> NDArray[N]:
    """The value of every span, once for each of its tokens."""
    lengths = np.array([span.end - span.start for span in spans], np.int64)
    return np.repeat(np.array(values, dtype), lengths)


def _kept_ids(row: Sequence[_Call]) -> tuple[NDArray[np.int64], ...] | None:
    if all(call.trace.kept_token_ids is None for call in row):
        return None
    kept: list[Sequence[int]] = []
    for call in row:
        everything = ((),) * len(call.trace.completion_token_ids)
        kept += everything if call.trace.kept_token_ids is None else call.trace.kept_token_ids
    return tuple([np.array(ids, dtype=np.int64) for ids in kept])
