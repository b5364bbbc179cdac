"""What a worker of vLLM does when it is told to stage an update: as vLLM's own, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ludic.distributed.in_vllm.worker import WorkerExtension

UPDATE = {"plane": "ipc"}


class Engine:
    """Holds names for tensors."""

    def __init__(self) -> None:
        self.staged: list[Any] = []
        self.applied = 0
        self.broken = ""
        self.holds, self.seconds = None, {"stage": 0.5}
        self.fetched = SimpleNamespace(drop=lambda: self.dropped.append(True))
        self.dropped: list[bool] = []

    def start_weight_update(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        self.staged = []

    def receipt(self) -> dict[str, Any]:
        return {name: ["1", "float32", [2]] for name in self.staged}


class Worker(WorkerExtension):
    """Keeps an update open as vLLM's workers do."""

    def __init__(self) -> None:
        self.weight_transfer_engine = Engine()
        self.active = False

    def start_weight_update(self) -> None:
        if self.active:
            raise RuntimeError("an update is active already")
        self.weight_transfer_engine.start_weight_update()
        self.active = True

    def update_weights(self, update: dict[str, Any]) -> None:
        if update["plane"] != "ipc":
            self.active = False
            raise ValueError("no such plane")
        self.weight_transfer_engine.staged = ["a.weight"]

    def finish_weight_update(self) -> None:
        if not self.active:
            raise RuntimeError("no update is active")
        self.weight_transfer_engine.applied += bool(self.weight_transfer_engine.staged)
        self.active = False


@pytest.mark.parametrize("left_open", [False, True])
def test_an_update_is_opened_and_staged_and_what_was_left_open_is_never_applied(
    left_open: bool,
) -> None:
    worker = Worker()
    if left_open:
        worker.start_weight_update()
        worker.weight_transfer_engine.staged = ["another's"]
    answer = worker.ludic_stage(UPDATE)
    assert answer["tensors"] == {"a.weight": ["1", "float32", [2]]}
    assert (answer["applied"], answer["seconds"]) == (0, {"stage": 0.5})
    assert worker.active


def test_one_that_is_refused_can_be_dropped_and_followed_by_another() -> None:
    worker = Worker()
    assert worker.ludic_stage({"plane": "?"}) == {"error": "ValueError: no such plane"}
    assert worker.ludic_stage(UPDATE)["tensors"]
    assert worker.ludic_stage(None) == {}
    engine = worker.weight_transfer_engine
    assert (worker.active, engine.staged, engine.applied, engine.dropped) == (False, [], 0, [True])


def test_a_worker_that_must_be_started_again_says_why() -> None:
    worker = Worker()
    worker.weight_transfer_engine.broken = "this server must be restarted"
    assert "must be restarted" in worker.ludic_stage(UPDATE)["error"]
    assert "without the weight transfer" in WorkerExtension().ludic_stage(UPDATE)["error"]


def test_one_whose_answers_nobody_hears_raises_instead() -> None:
    worker: Any = Worker()
    worker.parallel_config = SimpleNamespace(data_parallel_index=0)
    assert "no such plane" in worker.ludic_stage({"plane": "?"})["error"]
    worker.parallel_config.data_parallel_index = 1
    with pytest.raises(ValueError, match="no such plane"):
        worker.ludic_stage({"plane": "?"})
