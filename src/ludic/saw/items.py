"""State, action, weight: all that the trainer ever sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from ludic.plumbing.records import Record

UNKNOWN_VERSION = -1
"""The value in `SampleAttachments.versions` of a token whose policy version was not recorded."""


class SampleAttachments(Record, frozen=True, eq=False):
    """Data per action token; each field has length `sum(action_mask)` or is None.

    `token_weights` has the weight of every action token; in a merged item the turns differ.
    `kept_token_ids` has, for each action token, the ids that truncated sampling kept (empty: all).
    """

    behavior_logprobs: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    token_weights: NDArray[np.float32] | None = None
    versions: NDArray[np.int64] | None = None
    kept_token_ids: Sequence[NDArray[np.int64]] | None = None


class TurnSpan(Record, frozen=True):
    """Which action tokens of an item (`start` to `end`, counted in action tokens) belong to which
    turn. A turn whose prompts forked has spans in more than one item."""

    start: int
    end: int
    turn_index: int
    weight: float


class SAWItem(Record, frozen=True, eq=False):
    """One training sequence: token ids, which of them are actions, and their weight.

    A merged item has several turns: its `weight` is NaN, and `attachments.token_weights` has the
    weights. `temperature` is the temperature at which the actions were sampled.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int8]
    action_mask: NDArray[np.int8]
    weight: float
    meta: Mapping[str, Any] = field(default_factory=dict)
    attachments: SampleAttachments = SampleAttachments()
    turns: tuple[TurnSpan, ...] = ()
    rollout_id: str = ""
    group_id: str | None = None
    temperature: float = 1.0


class BatchCounts(Record, frozen=True):
    """How many of each the whole macro-batch has, over all ranks: the losses' normalisers."""

    tokens: int
    turns: int
    rollouts: int
    groups: int


class SAWBatch(Record, frozen=True, eq=False):
    """A macro-batch: the data of one update. `meta` has statistics of the rollouts and the number
    of turns dropped, by reason."""

    items: tuple[SAWItem, ...]
    counts: BatchCounts
    meta: Mapping[str, Any] = field(default_factory=dict)
