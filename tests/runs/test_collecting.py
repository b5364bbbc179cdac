"""The collector during a run, and after it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from ludic.pipeline.actor import ActorReport
from ludic.runs.interruption import rare_collections
from ludic.runs.pipeline import acting


def test_what_is_there_before_a_run_is_not_looked_at_and_afterwards_all_is_as_it_was() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_freeze_count() > frozen + 1000
        assert gc.get_threshold()[0] > thresholds[0]
        assert gc.isenabled()
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


def test_a_cycle_with_a_lot_of_memory_is_freed_although_collections_are_rare() -> None:
    class Board:
        """Refers to itself, as an environment may."""

        def __init__(self) -> None:
            self.itself = self

    with rare_collections(every_s=0.01):
        freed = threading.Event()
        weakref.finalize(Board(), freed.set)
        assert freed.wait(60)


def test_an_actor_is_spared_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = []

    async def run_pipeline_actor(*_: Any, **__: Any) -> ActorReport:
        frozen.append(gc.get_freeze_count())
        return ActorReport("it")

    monkeypatch.setattr(acting, "run_pipeline_actor", run_pipeline_actor)
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "tiny"\n[env]\nkind = "tic_tac_toe"\n')
    asyncio.run(acting.act_for(str(file), url="unix:///nowhere/redis.sock"))
    assert frozen[0] > 1000
    assert gc.get_freeze_count() == 0
