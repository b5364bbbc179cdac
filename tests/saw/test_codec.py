from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from ludic.errors import LudicError, SchemaVersionError, SerializationError
from ludic.saw import (
    SAWBatch,
    SAWItem,
    batch_from_dict,
    batch_to_dict,
    build_items,
    item_from_dict,
    item_to_dict,
    make_batch,
)
from ludic.types import Rollout
from tests.saw.drawing import batches, damaged, drawn_credit


def assert_same(a: SAWItem, b: SAWItem) -> None:
    for name in ("input_ids", "attention_mask", "action_mask"):
        one, other = getattr(a, name), getattr(b, name)
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
    for name in ("meta", "turns", "rollout_id", "group_id", "temperature"):
        assert getattr(a, name) == getattr(b, name)
    np.testing.assert_equal(a.weight, b.weight)
    for field in fields(a.attachments):
        one, other = getattr(a.attachments, field.name), getattr(b.attachments, field.name)
        assert (one is None) == (other is None)
        if one is None:
            continue
        if field.name == "kept_token_ids":
            assert [x.tolist() for x in one] == [x.tolist() for x in other]
        else:
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()


@settings(max_examples=25)
@given(batches(), st.integers(0, 9), st.booleans())
def test_items_survive_json_and_msgpack_to_the_bit(
    batch: list[Rollout], seed: int, merge: bool
) -> None:
    items = build_items(batch, drawn_credit(batch, seed), merge=merge)
    for item in items:
        plain = item_to_dict(item)
        assert_same(item_from_dict(json.loads(json.dumps(plain, allow_nan=False))), item)
        assert_same(item_from_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(plain))), item)


def test_a_batch_survives_with_its_counts_and_meta() -> None:
    item = SAWItem(
        np.array([1, 2]), np.ones(2, dtype=np.int8), np.array([0, 1], dtype=np.int8), 0.5
    )
    batch = make_batch([item], {"dropped": {"overlong": 2}})
    again = batch_from_dict(json.loads(json.dumps(batch_to_dict(batch))))
    assert again.counts == batch.counts
    assert again.meta == batch.meta
    assert_same(again.items[0], batch.items[0])


def test_a_newer_schema_is_refused() -> None:
    item = SAWItem(
        np.array([1, 2]), np.ones(2, dtype=np.int8), np.array([0, 1], dtype=np.int8), 0.5
    )
    assert item_to_dict(item)["schema"] == 2  # what is on disks already
    plain = {**item_to_dict(item), "schema": 3}
    with pytest.raises(SchemaVersionError, match=r"schema 3, .* reads up to 2"):
        item_from_dict(plain)


@pytest.mark.parametrize(
    "broken",
    [{}, [], 5, {"schema": 1}, {"schema": "1"}, {"schema": 1, "attachments": 3}, {"schema": True}],
)
def test_what_is_no_item_and_no_batch_is_refused(broken: Any) -> None:
    for read in (item_from_dict, batch_from_dict):
        with pytest.raises(SerializationError):
            read(broken)


def small_batch(meta: Mapping[str, Any]) -> SAWBatch:
    item = SAWItem(np.array([1, 2]), np.ones(2, np.int8), np.array([0, 1], np.int8), 0.5, meta=meta)
    return make_batch([item], meta)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", "12"),
        ("input_ids", [1, "2"]),
        ("input_ids", [1.5, 2]),
        ("input_ids", [[1], [2]]),
        ("input_ids", [1, 2**70]),
        ("action_mask", [0, 300]),
        ("action_mask", None),
        ("weight", "0.5"),
        ("weight", [0.5]),
        ("turns", [[0, 1]]),
        ("turns", [["0", 1, 0, 0.5]]),
        ("turns", 3),
        ("meta", 3),
        ("meta", "{"),
        ("meta", "[]"),
        ("meta", "[" * 200_000),
        ("attachments", {"versions": ["new"]}),
        ("attachments", {"dreams": [1.0]}),
        ("attachments", {"kept_token_ids": [1]}),
        ("rollout_id", 7),
        ("temperature", "warm"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_with_its_item(field: str, value: Any) -> None:
    plain = batch_to_dict(small_batch({}))
    plain["items"].append({**plain["items"][0], field: value})
    with pytest.raises(SerializationError, match="item 1"):
        batch_from_dict(plain)


@pytest.mark.parametrize(
    "broken",
    [{"items": 5}, {"items": [5]}, {"counts": {"tokens": 1}}, {"counts": []}, {"meta": None}],
)
def test_a_batch_of_the_wrong_types_is_refused(broken: Mapping[str, Any]) -> None:
    with pytest.raises(SerializationError):
        batch_from_dict({**batch_to_dict(small_batch({})), **broken})


def test_integers_of_any_size_reach_the_other_ranks_in_the_meta() -> None:
    meta = {"answer": 2**64, "deep": [{"below": -(2**70)}]}
    sent = msgspec.msgpack.encode(batch_to_dict(small_batch(meta)))
    again = batch_from_dict(msgspec.msgpack.decode(sent))
    assert again.meta == meta
    assert again.items[0].meta == meta


def test_a_batch_of_the_first_schema_is_read() -> None:
    meta = {"dropped": {"overlong": 2}}
    plain = batch_to_dict(small_batch(meta))
    old = {**plain, "schema": 1, "meta": meta}
    old["items"] = [{**item, "schema": 1, "meta": meta} for item in plain["items"]]
    again = batch_from_dict(old)
    assert again.meta == again.items[0].meta == meta


@given(batches(), st.integers(0, 9), st.data())
def test_a_damaged_batch_is_read_or_refused_and_nothing_else(
    rollouts: list[Rollout], seed: int, data: st.DataObject
) -> None:
    items = build_items(rollouts, drawn_credit(rollouts, seed))
    plain = json.loads(json.dumps(batch_to_dict(make_batch(items))))
    with suppress(LudicError):
        assert isinstance(batch_from_dict(data.draw(damaged(plain))), SAWBatch)
