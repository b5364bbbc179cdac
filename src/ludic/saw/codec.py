"""Items and batches to plain dicts for JSON and msgpack, and back, without loss."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import asdict

from ludic.errors import SerializationError
from ludic.plumbing.records import Record, check_schema, from_plain
from ludic.saw.items import BatchCounts, SampleAttachments, SAWBatch, SAWItem, TurnSpan

SCHEMA = 2
"""In schema 1, `meta` was a dict, but msgpack cannot encode integers of more than 64 bits."""


class _Attached(Record, frozen=True):
    behavior_logprobs: list[float] | None = None
    reference_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    token_weights: list[float] | None = None
    versions: list[int] | None = None
    kept_token_ids: list[list[int]] | None = None


class _Item(Record, frozen=True):
    schema: int
    input_ids: list[int]
    attention_mask: list[int]
    action_mask: list[int]
    weight: float | None
    meta: dict[str, Any] | str
    attachments: _Attached
    turns: list[tuple[int, int, int, float]]
    rollout_id: str
    group_id: str | None
    temperature: float


class _Batch(Record, frozen=True):
    schema: int
    items: list[dict[str, Any]]
    counts: BatchCounts
    meta: dict[str, Any] | str


def item_to_dict(item: SAWItem) -> dict[str, Any]:
    """One item as numbers, strings and lists. A merged item's NaN weight is written as None,
    float32 values as floats, which represent them exactly, and `meta` as JSON text, with values
    that JSON does not support replaced by their repr."""
    attached = {
        name: value.tolist() if isinstance(value, np.ndarray) else [ids.tolist() for ids in value]
        for name in _Attached.__struct_fields__
        if (value := getattr(item.attachments, name)) is not None
    }
    return {
        "schema": SCHEMA,
        "input_ids": item.input_ids.tolist(),
        "attention_mask": item.attention_mask.tolist(),
        "action_mask": item.action_mask.tolist(),
        "weight": None if math.isnan(item.weight) else float(item.weight),
        "meta": json.dumps(dict(item.meta), default=repr),
        "attachments": attached,
        "turns": [[s.start, s.end, s.turn_index, s.weight] for s in item.turns],
        "rollout_id": item.rollout_id,
        "group_id": item.group_id,
        "temperature": float(item.temperature),
    }


def item_from_dict(data: Mapping[str, Any]) -> SAWItem:
    """Reads what `item_to_dict` wrote; `SerializationError` names the field at fault."""
    check_schema(data, SCHEMA, "an item")
    item = from_plain(_Item, data)
    try:
        attached: dict[str, Any] = {
            name: tuple(np.array(ids, dtype=np.int64) for ids in values)
            if name == "kept_token_ids"
            else np.array(values, dtype=np.int64 if name == "versions" else np.float32)
            for name, values in asdict(item.attachments).items()
            if values is not None
        }
        return SAWItem(
            input_ids=np.array(item.input_ids, dtype=np.int64),
            attention_mask=np.array(item.attention_mask, dtype=np.int8),
            action_mask=np.array(item.action_mask, dtype=np.int8),
            weight=math.nan if item.weight is None else item.weight,
            meta=_meta(item.meta),
            attachments=SampleAttachments(**attached),
            turns=tuple(TurnSpan(*turn) for turn in item.turns),
            rollout_id=item.rollout_id,
            group_id=item.group_id,
            temperature=item.temperature,
        )
    except OverflowError as exc:
        raise SerializationError(f"not a SAWItem: {exc}") from exc


def batch_to_dict(batch: SAWBatch) -> dict[str, Any]:
    """A whole batch, with its items as `item_to_dict` writes them."""
    return {
        "schema": SCHEMA,
        "items": [item_to_dict(item) for item in batch.items],
        "counts": asdict(batch.counts),
        "meta": json.dumps(dict(batch.meta), default=repr),
    }


def batch_from_dict(data: Mapping[str, Any]) -> SAWBatch:
    """Reads what `batch_to_dict` wrote; `SerializationError` names the item and field at fault."""
    check_schema(data, SCHEMA, "a batch")
    batch = from_plain(_Batch, data)
    items = []
    for index, item in enumerate(batch.items):
        try:
            items.append(item_from_dict(item))
        except SerializationError as exc:
            raise type(exc)(f"item {index}: {exc}") from exc
    return SAWBatch(tuple(items), batch.counts, _meta(batch.meta))


def _meta(meta: Mapping[str, Any] | str) -> Mapping[str, Any]:
    try:
        found = json.loads(meta) if isinstance(meta, str) else meta
    except (ValueError, RecursionError) as exc:
        raise SerializationError(f"its meta is not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise SerializationError(f"its meta is not an object but {found!r:.80}")
    return found
