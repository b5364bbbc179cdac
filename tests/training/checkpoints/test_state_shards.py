"""Rows that some ranks wrote are read by any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ludic.errors import CheckpointError
from ludic.sharding.world import World
from ludic.training import checkpoint_contents
from ludic.training.checkpoint_contents import describe_shards, load_tensors, write_shard

WHOLE = {
    "matrix": torch.arange(21.0).view(7, 3),
    "vector": torch.arange(7.0) + 100,
    "count": torch.tensor(5.0),
}


def rows_of(tensor: Tensor, rank: int, size: int) -> tuple[Tensor | None, int | None, Any]:
    """What `local_rows` says of a tensor that is sharded evenly; one without rows is not."""
    if tensor.ndim == 0:
        return tensor, None, ()
    each = -(-len(tensor) // size)
    rows = tensor[rank * each : (rank + 1) * each]
    return rows if len(rows) else None, rank * each, tuple(tensor.shape)


def shard(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(
        checkpoint_contents, "local_rows", lambda tensor: rows_of(tensor, rank, size)
    )


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> dict[str, Any]:
    for rank in range(ranks):
        shard(monkeypatch, rank, ranks)
        write_shard(folder, WHOLE, {"rng": torch.tensor([rank])}, World(rank, ranks))
    return describe_shards(folder, ranks)


@pytest.mark.parametrize("writers", [1, 2, 3, 5])
@pytest.mark.parametrize("readers", [1, 2, 4, 5])
def test_any_ranks_read_what_any_others_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: int, readers: int
) -> None:
    described = written(tmp_path, monkeypatch, writers)
    assert described.keys() == WHOLE.keys()
    assert len(described["count"]["pieces"]) == 1  # what every rank has whole, one of them writes
    for rank in range(readers):
        shard(monkeypatch, rank, readers)
        found = load_tensors(tmp_path, described, WHOLE, required=WHOLE)
        for name, whole in WHOLE.items():
            rows = rows_of(whole, rank, readers)[0]
            expected = whole[:0] if rows is None else rows
            assert torch.equal(found[name], expected)


def test_the_pieces_say_where_their_rows_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = written(tmp_path, monkeypatch, 2)
    assert described["matrix"] == {
        "shape": [7, 3],
        "pieces": [
            {"file": "state-00000.safetensors", "offset": 0},
            {"file": "state-00001.safetensors", "offset": 4},
        ],
    }
    assert described["count"]["pieces"] == [{"file": "state-00000.safetensors", "offset": 0}]


def test_what_is_missing_is_an_error_only_where_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = written(tmp_path, monkeypatch, 1)
    wanted = {"other": torch.zeros(2), **WHOLE}
    found = load_tensors(tmp_path, described, wanted, required=WHOLE)
    assert found.keys() == WHOLE.keys()
    with pytest.raises(CheckpointError, match="lacks 'other'"):
        load_tensors(tmp_path, described, wanted, required=wanted)
    with pytest.raises(CheckpointError, match=r"matrix has shape \[7, 3\] there, \[7, 4\] here"):
        load_tensors(tmp_path, described, {"matrix": torch.zeros(7, 4)}, required={})
