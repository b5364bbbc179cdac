"""Random rollouts with the shapes that merging has to deal with, and what they must come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ludic.saw import SAWItem
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Fork,
    ForkReason,
    Message,
    Rollout,
    RolloutStepKey,
    Step,
    TokenTrace,
    VersionSpan,
)

Fact = tuple[Any, ...]
"""One trained token: where it stands, what it is, and everything that is known of it."""

# Few different ids, so that prompts sometimes extend each other by accident.
token_ids = st.integers(0, 3)
finite = st.floats(-4.0, 4.0, width=32)


def message(text: str = "x") -> Message:
    return {"role": "assistant", "content": text}


@st.composite
def traces(draw: st.DrawFn, previous: TokenTrace | None, logprobs: bool) -> TokenTrace:
    """A call that extends the previous one's tokens, or stands alone, or almost extends them."""
    new = tuple(draw(st.lists(token_ids, min_size=1, max_size=3)))
    how = draw(st.sampled_from(("extend", "extend", "extend", "fork", "cut")))
    prompt = new
    if previous is not None and how == "extend":
        prompt = previous.token_ids + new
    elif previous is not None and how == "cut":
        prompt = previous.token_ids[:-1] + new
    completion = tuple(draw(st.lists(token_ids, min_size=1, max_size=4)))
    n = len(completion)
    split = draw(st.integers(0, n))
    spans = (VersionSpan(0, split, 3), VersionSpan(split, n, draw(st.integers(3, 5))))
    return TokenTrace(
        prompt,
        completion,
        tuple(draw(st.lists(finite, min_size=n, max_size=n))) if logprobs else None,
        spans if draw(st.booleans()) else (),
        tuple(tuple(draw(st.lists(token_ids, max_size=2, unique=True))) for _ in range(n))
        if draw(st.booleans())
        else None,
    )


@st.composite
def rollouts(draw: st.DrawFn, rollout_id: str = "r") -> Rollout:
    """Up to five turns of up to three model calls each, some heard outcomes in between."""
    steps: list[Step] = []
    previous: TokenTrace | None = None
    logprobs = draw(st.booleans())
    for turn in range(draw(st.integers(1, 5))):
        calls = []
        for _ in range(draw(st.integers(1, 3))):
            trace = draw(traces(previous, logprobs))
            fork = None
            if previous is not None and not trace.extends(previous):
                fork = Fork(ForkReason.HISTORY_REWRITTEN)
            calls.append(len(steps))
            steps.append(
                AgentStep(
                    turn,
                    (),
                    message(),
                    draw(st.sampled_from((FinishReason.STOP, FinishReason.LENGTH))),
                    trace,
                    fork,
                    sampling={"temperature": draw(st.sampled_from((1.0, 1.0, 1.0, 0.7)))},
                )
            )
            previous = trace
        parse_error = draw(st.booleans())
        steps.append(
            EnvironmentStep(
                turn,
                tuple(calls),
                "o",
                None if parse_error else "a",
                "n",
                draw(finite),
                stepped=not parse_error,
                info={"parse_error": True} if parse_error else {},
            )
        )
        if draw(st.booleans()):
            steps.append(EnvironmentStep(turn, (), "o", None, "n", draw(finite)))
    return Rollout(rollout_id, tuple(steps), episode_id=rollout_id, group_id="g")


JUNK = st.sampled_from(
    (None, True, -1, 2**70, 0.5, float("nan"), "", "x", "\ud800", [], [0], [[1]], {}, {"a": 1})
)


@st.composite
def damaged(draw: st.DrawFn, plain: Any) -> Any:
    """What JSON read, with one place of it replaced, removed or repeated."""
    if isinstance(plain, dict | list) and plain and draw(st.integers(0, 4)):
        places = list(plain) if isinstance(plain, dict) else range(len(plain))
        at = draw(st.sampled_from(places))
        how = draw(st.sampled_from(("within", "within", "within", "remove", "repeat")))
        copied: Any = plain.copy()
        if how == "remove":
            del copied[at]
        elif how == "repeat":
            if isinstance(plain, dict):
                copied[f"{at}?"] = plain[at]
            else:
                copied.append(plain[at])
        else:
            copied[at] = draw(damaged(plain[at]))
        return copied
    return draw(JUNK)


@st.composite
def batches(draw: st.DrawFn) -> list[Rollout]:
    """Several rollouts with ids of their own."""
    return [draw(rollouts(f"r{i}")) for i in range(draw(st.integers(1, 3)))]


def drawn_credit(batch: Sequence[Rollout], seed: int) -> dict[RolloutStepKey, float]:
    """A weight for every turn."""
    draw = np.random.default_rng(seed)
    return {(r.id, t.index): float(draw.normal()) for r in batch for t in r.turns()}


def facts_of_items(items: Iterable[SAWItem]) -> Counter[Fact]:
    """Every action token of the items with its whole context, turn, weight and attachments."""
    found: Counter[Fact] = Counter()
    for item in items:
        attached = item.attachments
        turn_of = [s.turn_index for s in item.turns for _ in range(s.start, s.end)]
        for k, at in enumerate(np.flatnonzero(item.action_mask)):
            kept = attached.kept_token_ids
            weights = attached.token_weights
            found[
                item.rollout_id,
                item.group_id,
                turn_of[k],
                tuple(item.input_ids[:at].tolist()),
                int(item.input_ids[at]),
                float(np.float32(item.weight) if weights is None else weights[k]),
                None
                if attached.behavior_logprobs is None
                else float(attached.behavior_logprobs[k]),
                -1 if attached.versions is None else int(attached.versions[k]),
                () if kept is None else tuple(kept[k].tolist()),
                item.temperature,
            ] += 1
    return found


def facts_of_rollouts(
    batch: Iterable[Rollout], credit: Mapping[RolloutStepKey, float]
) -> Counter[Fact]:
    """The same, read off the model calls one by one, without any item."""
    found: Counter[Fact] = Counter()
    for rollout in batch:
        for step in rollout.agent_steps:
            trace = step.trace
            assert trace is not None
            for k, token in enumerate(trace.completion_token_ids):
                version = [s.version for s in trace.version_spans if s.start <= k < s.end]
                found[
                    rollout.id,
                    rollout.group_id,
                    step.turn_index,
                    trace.prompt_token_ids + trace.completion_token_ids[:k],
                    token,
                    float(np.float32(credit[rollout.id, step.turn_index])),
                    None
                    if trace.completion_logprobs is None
                    else float(np.float32(trace.completion_logprobs[k])),
                    version[-1] if version else -1,
                    () if trace.kept_token_ids is None else trace.kept_token_ids[k],
                    step.sampling.get("temperature", 1.0),
                ] += 1
    return found
