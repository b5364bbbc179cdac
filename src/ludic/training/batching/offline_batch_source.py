"""SFT and offline RL: batches from files, datasets, or stored rollouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ludic.errors import BatchError, CheckpointError, ConfigError, SerializationError
from ludic.inference.templates.chat_template import ChatTemplate
from ludic.rollouts.lines import read_rows
from ludic.rollouts.storage import rollout_from_row
from ludic.saw.batch import LOST_MEMBER
from ludic.saw.building import CreditAssigner, LostMember, batch_from_rollouts, build_items
from ludic.saw.filters import SampleFilter
from ludic.saw.items import SAWBatch
from ludic.seeding import derive_seed
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.demonstrations import TrainOn, rollout_from_messages, row_messages
from ludic.training.batching.source import BatchSource, batch_of_any_age
from ludic.training.credit_assignment.returns import ConstantCredit
from ludic.types import Rollout, RolloutStepKey

Row: TypeAlias = Mapping[str, Any]
Data: TypeAlias = "str | Path | Sequence[Row] | Sequence[Rollout] | Sequence[Path] | Sequence[str]"


@dataclass(eq=False, repr=False)
class OfflineBatchSource(BatchSource):
    """Batches of stored data, in an order that is shuffled anew each epoch.

    `data` is a JSONL file (or several; `.zst` and `.gz` too), a Hugging Face dataset, any sequence
    of rows, or a sequence of rollouts. A row has `messages`, or `prompt` and `completion`, which
    `chat_template` turns into tokens, or is a stored rollout; `row_fn` maps other rows to these.
    Rows may have `tools`, a `weight` that scales their credit, and a `reward`, `group_id` and
    `task_key` for credit that uses them. Rollouts of one group stay in one batch.

    A batch has `batch_size` rows (whole groups may exceed it), or as many as fit into
    `batch_tokens` tokens. Without an `algorithm` every turn has weight 1, as for SFT. After
    `epochs`, `next_batch` raises `StopAsyncIteration`. The position is saved and resumed exactly.
    The trainer refuses a sample over its `max_seq_len`; with `overlong="drop"`, for episodes that
    nobody wrote by hand, it leaves out the episode instead, and counts it.
    """

    data: Data
    _: KW_ONLY
    chat_template: ChatTemplate | None = None
    algorithm: RLAlgorithm | None = None
    batch_size: int | None = None
    batch_tokens: int | None = None
    epochs: int | None = None
    shuffle: bool = True
    seed: int = 0
    row_fn: Callable[[Any], Row] | None = None
    train_on: TrainOn = "all"
    sample_filter: SampleFilter | None = None
    merge: bool = True
    lost_member: LostMember = "drop_group"
    overlong: Literal["refuse", "drop"] = "refuse"
    waits_for_publish = False
    epoch: int = field(default=0, init=False)
    position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.batch_tokens is None):
            raise ConfigError("OfflineBatchSource: set either batch_size or batch_tokens")
        for name in ("batch_size", "batch_tokens", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"OfflineBatchSource: {name}={value}: must be at least 1")
        if self.train_on not in ("all", "last"):
            raise ConfigError(f"train_on={self.train_on!r}: must be 'all' or 'last'")
        self._rows = _load(self.data)
        if not len(self._rows):
            raise ConfigError("OfflineBatchSource: the data holds no rows")
        self._units = self._find_units()
        self._order_of: tuple[int, Sequence[int]] | None = None

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    async def next_batch(self) -> SAWBatch:
        """The next rows as a batch. A batch never crosses the end of an epoch, so the last one may
        be smaller."""
        began, drops = self.epoch, Counter[str]()
        credit = self.algorithm.credit_assigner if self.algorithm else ConstantCredit()
        while True:
            if self.epochs is not None and self.epoch >= self.epochs:
                raise StopAsyncIteration(f"{self.epochs} epochs are over")
            if self.epoch > began + 1:
                raise BatchError(f"a whole epoch had nothing to train on: dropped {dict(drops)}")
            meta: dict[str, Any] = {"epoch": self.epoch, "position": self.position}
            if self.overlong == "drop":
                meta[LOST_MEMBER] = self.lost_member
            batch = batch_from_rollouts(
                self._take(),
                _RowWeighted(credit),
                sample_filter=self.sample_filter,
                merge=self.merge,
                lost_member=self.lost_member,
                drops=drops,
                meta=meta,
            )
            if batch.items:
                return batch_of_any_age(batch)
            drops = Counter(batch.meta["dropped"])

    def _take(self) -> list[Rollout]:
        """The rollouts of the next batch; advances the position."""
        taken: list[Rollout] = []
        tokens = 0
        order = self._order()
        while self.position < len(order):
            unit = [self._rollout(row) for row in self._units[order[self.position]]]
            if self.batch_tokens is not None:
                tokens += self._tokens_of(unit)
                if taken and tokens > self.batch_tokens:
                    return taken
            taken.extend(unit)
            self.position += 1
            if self.batch_size is not None and len(taken) >= self.batch_size:
                break
        if self.position >= len(order):
            self.epoch, self.position = self.epoch + 1, 0
        return taken

    def _order(self) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self._units))
        if self._order_of is None or self._order_of[0] != self.epoch:
            draw = np.random.default_rng(derive_seed(self.seed, "epoch", self.epoch))
            self._order_of = (self.epoch, draw.permutation(len(self._units)).tolist())
        return self._order_of[1]

    def _find_units(self) -> list[list[int]]:
        """Rows that must share a batch: those of one group."""
        columns = getattr(self._rows, "column_names", None)
        if columns is not None and self.row_fn is None and "group_id" not in columns:
            return [[index] for index in range(len(self._rows))]
        units: dict[Any, list[int]] = {}
        for index in range(len(self._rows)):
            row = self._row(index)
            group = row.group_id if isinstance(row, Rollout) else row.get("group_id") or None
            units.setdefault(index if group is None else ("group", group), []).append(index)
        return list(units.values())

    def _row(self, index: int) -> Row | Rollout:
        """The row, mapped by `row_fn`."""
        row = self._rows[index]
        if isinstance(row, Rollout):
            return row
        if self.row_fn is not None:
            try:
                row = self.row_fn(row)
            except Exception as exc:
                raise SerializationError(
                    f"row {index}: row_fn raised {type(exc).__name__}: {exc}"
                ) from exc
        if not isinstance(row, Mapping):
            raise SerializationError(
                f"row {index} is {type(row).__name__}, not a mapping: map it with row_fn"
            )
        return row

    def _rollout(self, index: int) -> Rollout:
        row, where = self._row(index), f"row {index}"
        if isinstance(row, Rollout):
            return row
        weight = _number(row, "weight", where)
        meta = {} if weight is None else {"weight": weight}
        if "rollout" in row:
            stored = rollout_from_row(row, where)
            return stored.labelled(meta={**stored.meta, **meta}) if meta else stored
        messages, prompt_messages = row_messages(row, where)
        if self.chat_template is None:
            raise ConfigError(
                f"{where} holds messages: OfflineBatchSource needs a chat_template, such as "
                "HFChatTemplate(tokenizer), to tokenise them"
            )
        return rollout_from_messages(
            messages,
            self.chat_template,
            rollout_id=f"row-{index}",
            tools=row.get("tools") or None,
            train_on=self.train_on,
            prompt_messages=prompt_messages,
            reward=_number(row, "reward", where) or 0.0,
            group_id=row.get("group_id") or None,
            task_key=row.get("task_key") or None,
            meta=meta,
        )

    def _tokens_of(self, rollouts: Sequence[Rollout]) -> int:
        credit = ConstantCredit().compute(rollouts)
        items = build_items(rollouts, credit, merge=self.merge, sample_filter=self.sample_filter)
        return sum(len(item.input_ids) for item in items)

    def state_dict(self) -> Mapping[str, Any]:
        """The position, and what identifies the data and its order."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "rows": len(self._rows),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the saved position; refuses that of other data or another order."""
        own = self.state_dict()
        for name in ("rows", "seed", "shuffle"):
            if state.get(name) != own[name]:
                raise CheckpointError(
                    f"the checkpoint is of a source with {name}={state.get(name)!r}, this one has "
                    f"{name}={own[name]!r}: resume with the same data and order"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


@dataclass(frozen=True, slots=True)
class _RowWeighted:
    """Credit times the row's weight."""

    credit: CreditAssigner

    def compute(self, rollouts: Sequence[Rollout]) -> Mapping[RolloutStepKey, float]:
        weights = {r.id: w for r in rollouts if (w := r.meta.get("weight")) is not None}
        credit = self.credit.compute(rollouts)
        if not weights:
            return credit
        return {key: value * weights.get(key[0], 1.0) for key, value in credit.items()}


def _number(row: Row, name: str, where: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise SerializationError(f"{where}: {name} is {value!r}; it must be a finite number")
    return number


def _load(data: Any) -> Sequence[Any]:
    """The rows as a sequence. Files are read completely; datasets are used as they are."""
    if isinstance(data, str | Path):
        return [row for row, _ in read_rows(data, "rows")]
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"OfflineBatchSource: {type(data).__name__} has no length and order: give a path, a "
            "map-style dataset, or a list"
        )
    if len(data) and isinstance(data[0], str | Path):
        return [row for path in data for row, _ in read_rows(path, "rows")]
    rows: Sequence[Any] = data
    return rows
