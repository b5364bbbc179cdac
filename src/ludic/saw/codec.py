"""Items and batches as plain dicts that JSON and msgpack take, and back, without loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from ludic.errors import SchemaVersionError, SerializationError
from ludic.saw.items import BatchCounts, SampleAttachments, SAWBatch, SAWItem, TurnSpan

SCHEMA = 1
_ATTACHED = {
    "behavior_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "teacher_logprobs": np.float32,
    "token_weights": np.float32,
    "versions": np.int64,
}


def item_to_dict(item: SAWItem) -> dict[str, Any]:
    """One item as numbers, strings and lists. A merged item's NaN weight is written as None, and
    float32 values as floats, which hold them exactly."""
    attached: dict[str, Any] = {
        name: value.tolist()
        for name in _ATTACHED
        if (value := getattr(item.attachments, name)) is not None
    }
    if item.attachments.kept_token_ids is not None:
        attached["kept_token_ids"] = [ids.tolist() for ids in item.attachments.kept_token_ids]
    return {
        "schema": SCHEMA,
        "input_ids": item.input_ids.tolist(),
        "attention_mask": item.attention_mask.tolist(),
        "action_mask": item.action_mask.tolist(),
        "weight": None if math.isnan(item.weight) else float(item.weight),
        "meta": dict(item.meta),
        "attachments": attached,
        "turns": [[s.start, s.end, s.turn_index, s.weight] for s in item.turns],
        "rollout_id": item.rollout_id,
        "group_id": item.group_id,
        "temperature": float(item.temperature),
    }


def item_from_dict(data: Mapping[str, Any]) -> SAWItem:
    """Reads what `item_to_dict` wrote."""
    _check_schema(data, "item")
    try:
        attached = dict(data["attachments"])
        kept = attached.pop("kept_token_ids", None)
        return SAWItem(
            input_ids=np.array(data["input_ids"], dtype=np.int64),
            attention_mask=np.array(data["attention_mask"], dtype=np.int8),
            action_mask=np.array(data["action_mask"], dtype=np.int8),
            weight=math.nan if data["weight"] is None else data["weight"],
            meta=data["meta"],
            attachments=SampleAttachments(
                kept_token_ids=None
                if kept is None
                else tuple(np.array(ids, dtype=np.int64) for ids in kept),
                **{name: np.array(v, dtype=_ATTACHED[name]) for name, v in attached.items()},
            ),
            turns=tuple(TurnSpan(*span) for span in data["turns"]),
            rollout_id=data["rollout_id"],
            group_id=data["group_id"],
            temperature=data["temperature"],
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise SerializationError(f"this is no SAWItem: {type(exc).__name__}: {exc}") from exc


def batch_to_dict(batch: SAWBatch) -> dict[str, Any]:
    """A whole batch, as `item_to_dict` writes its items. `meta` must hold JSON values."""
    return {
        "schema": SCHEMA,
        "items": [item_to_dict(item) for item in batch.items],
        "counts": asdict(batch.counts),
        "meta": dict(batch.meta),
    }


def batch_from_dict(data: Mapping[str, Any]) -> SAWBatch:
    """Reads what `batch_to_dict` wrote."""
    _check_schema(data, "batch")
    try:
        items = tuple(item_from_dict(item) for item in data["items"])
        return SAWBatch(items, BatchCounts(**data["counts"]), data["meta"])
    except (KeyError, TypeError) as exc:
        raise SerializationError(f"this is no SAWBatch: {type(exc).__name__}: {exc}") from exc


def _check_schema(data: Mapping[str, Any], what: str) -> None:
    schema = data.get("schema")
    if not isinstance(schema, int):
        raise SerializationError(f"this {what} has no schema number: it is not one of Ludic's")
    if schema > SCHEMA:
        raise SchemaVersionError(
            f"this {what} has schema {schema}, and this version of Ludic reads up to {SCHEMA}: "
            "update Ludic"
        )
