"""Whether a checkpoint is written in the background: runs do, where there is room for copies."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ludic.runs.model import trainer_config
from ludic.runs.settings import check_run
from ludic.training import checkpoint_contents
from ludic.training.checkpoint_contents import TrainerState, has_room_for, verify_checkpoint
from tests.training.checkpoints.test_checkpoint import make, run


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("free", "fits"), [(124, False), (125, True)])
def test_a_device_needs_a_quarter_more_than_the_copies(
    monkeypatch: pytest.MonkeyPatch, free: int, fits: bool, device: str
) -> None:
    where = torch.device(device)
    monkeypatch.setattr(checkpoint_contents, "_free_bytes", lambda own: free * (own == where))
    monkeypatch.setattr(checkpoint_contents, "local_rows", lambda tensor: (tensor, None, ()))
    # 60 and 40 bytes.
    tensors: list[Any] = [
        SimpleNamespace(device=where, numel=lambda n=n: n, element_size=lambda: 4) for n in (15, 10)
    ]
    assert has_room_for(tensors) == fits


def test_what_is_free_is_known_of_the_host_and_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_room_for([torch.empty(1).expand(10**6)])  # 4 MB, which nobody allocates
    assert not has_room_for([torch.empty(1).expand(10**15)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (124, 10**12))
    monkeypatch.setattr(checkpoint_contents, "local_rows", lambda tensor: (tensor, None, ()))
    gpu = torch.device("cuda")
    tensor: Any = SimpleNamespace(device=gpu, numel=lambda: 25, element_size=lambda: 4)
    assert not has_room_for([tensor])


def test_without_room_a_checkpoint_is_complete_when_saving_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_contents, "has_room_for", lambda tensors: False)
    trainer = make(tmp_path, background=True)
    waited = []
    finish = trainer._checkpoints.finish  # type: ignore[union-attr]

    def noted() -> None:
        waited.append(trainer._checkpoints._background._writing is not None)  # type: ignore[union-attr]
        finish()

    trainer._checkpoints.finish = noted  # type: ignore[method-assign, union-attr]
    run(trainer, 3)
    assert True in waited
    assert trainer._checkpoints.latest() is not None  # type: ignore[union-attr]


def test_a_part_that_goes_on_does_not_change_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, background=True)
    saver = trainer._checkpoints
    assert saver is not None
    may_write = Event()
    write = checkpoint_contents.write_shard

    def later(*args: Any) -> None:
        assert may_write.wait(20)
        write(*args)

    monkeypatch.setattr(checkpoint_contents, "write_shard", later)
    seen = [1, 2]
    saver.save(trainer.model, trainer.optimizer, TrainerState(1, 1, parts={"mine": {"seen": seen}}))
    seen.append(3)
    may_write.set()
    saver.finish()
    latest = saver.latest()
    assert latest is not None
    assert verify_checkpoint(latest)["state"]["parts"]["mine"] == {"seen": [1, 2]}
    trainer.close()


def test_runs_write_in_the_background(tmp_path: Path) -> None:
    config = check_run({"env": {"kind": "tic_tac_toe"}, "protocol": {"kind": "single_agent"}})
    cfg = trainer_config(config, "rl", tmp_path)
    assert cfg.checkpoint is not None
    assert cfg.checkpoint.background
