"""The collector during a run, and after it."""

from __future__ import annotations

import gc

from ludic.runs.interruption import rare_collections


def test_what_is_there_before_a_run_is_not_looked_at_and_afterwards_all_is_as_it_was() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_freeze_count() > frozen + 1000
        assert gc.get_threshold()[0] > thresholds[0]
        assert gc.isenabled()
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0
