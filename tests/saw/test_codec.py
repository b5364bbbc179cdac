from __future__ import annotations

import json
from dataclasses import fields

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.errors import SchemaVersionError, SerializationError
from ludic.saw import (
    SAWItem,
    batch_from_dict,
    batch_to_dict,
    build_items,
    item_from_dict,
    item_to_dict,
    make_batch,
)
from ludic.types import Rollout
from tests.saw.drawing import batches, drawn_credit


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


@settings(max_examples=40)
@given(batches(), st.integers(0, 9), st.booleans())
def test_items_survive_json_and_msgpack_to_the_bit(
    batch: list[Rollout], seed: int, merge: bool
) -> None:
    items = build_items(batch, drawn_credit(batch, seed), merge=merge)
    for item in items:
        plain = item_to_dict(item)
        assert_same(item_from_dict(json.loads(json.dumps(plain, allow_nan=False))), item)
        assert_same(item_from_dict(msgpack.unpackb(msgpack.packb(plain))), item)


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
    plain = {**item_to_dict(item), "schema": 99}
    with pytest.raises(SchemaVersionError, match="schema 99"):
        item_from_dict(plain)


@pytest.mark.parametrize("broken", [{}, {"schema": 1}, {"schema": 1, "attachments": 3}])
def test_what_is_no_item_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(SerializationError):
        item_from_dict(broken)
