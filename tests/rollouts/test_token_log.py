"""What the trainer made of each token, written and read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ludic.errors import SchemaVersionError, SerializationError
from ludic.rollouts.token_log import (
    TokenLog,
    UpdateTokens,
    open_token_log,
    read_token_log,
    trained_tokens,
)
from ludic.saw.items import SampleAttachments, SAWItem, TurnSpan


def item(rollout: str = "r", token_weights: list[float] | None = None) -> SAWItem:
    """Two turns: tokens 2 and 3 of the sequence, then 6 to 8."""
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1], np.int8)
    weights = token_weights or [0.5] * 2 + [-1.0] * 3
    return SAWItem(
        input_ids=np.arange(9),
        attention_mask=np.ones(9, np.int8),
        action_mask=mask,
        weight=float("nan"),
        attachments=SampleAttachments(token_weights=np.array(weights, np.float32)),
        turns=(TurnSpan(0, 2, 0, 0.5), TurnSpan(2, 5, 1, -1.0)),
        rollout_id=rollout,
    )


def update(number: int, items: list[SAWItem]) -> UpdateTokens:
    values = np.arange(5 * len(items), dtype=np.float32)
    return UpdateTokens(number, items, (-values / 3).astype(np.float32), values)


def test_what_is_written_is_read_back_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "train.tokens.jsonl.zst"
    items = [item(f"r{i}") for i in range(150)]  # more than one chunk
    with TokenLog(path) as log:
        log.write(update(3, items))
    found = list(read_token_log(path))
    assert [f.rollout_id for f in found] == [f"r{i}" for i in range(150)]
    last = found[-1]
    assert last.update == 3
    assert last.turns == ((0, 0.5, 2), (1, -1.0, 3))
    assert last.spans == ((2, 2), (6, 3))
    assert last.weights.tolist() == [0.5, 0.5, -1.0, -1.0, -1.0]
    expected = np.arange(745, 750, dtype=np.float32)
    assert np.array_equal(last.logprobs, -expected / 3)
    assert np.array_equal(last.entropies, expected)


def test_weights_that_differ_within_a_turn_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl.zst"
    with TokenLog(path) as log:
        log.write(update(1, [item(token_weights=[1.0, 2.0, 3.0, 4.0, 5.0])]))
    (found,) = read_token_log(path)
    assert found.weights.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_model_call_finds_its_tokens_by_turn_and_place(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl.zst"
    with TokenLog(path) as log:
        log.write(update(1, [item()]))
    (found,) = read_token_log(path)
    assert found.at(0, 2, 2) == slice(0, 2)
    assert found.at(1, 6, 3) == slice(2, 5)
    assert found.at(0, 6, 3) is None  # another turn's
    assert found.at(1, 5, 3) is None
    assert found.at(1, 6, 4) is None


def test_a_resumed_run_has_every_update_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl.zst"
    with open_token_log(path, 0) as log:
        for number in range(1, 5):
            log.write(update(number, [item(f"step-{number}")]))
    path.write_bytes(path.read_bytes() + path.read_bytes()[:20])  # half a block
    with open_token_log(path, 2) as log:
        log.write(update(3, [item("again")]))
    assert [f.rollout_id for f in read_token_log(path)] == ["step-1", "step-2", "again"]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"schema": 99}, SchemaVersionError),
        ({"schema": 1, "turns": []}, SerializationError),
        ([], SerializationError),
    ],
)
def test_lines_that_cannot_be_read_say_so(row: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        trained_tokens(row)
