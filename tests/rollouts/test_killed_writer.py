from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ludic.rollouts import RolloutWriter, read_rollouts

WRITER = """
import sys
from ludic.rollouts import RolloutWriter
from ludic.types import EnvironmentStep, Rollout

with RolloutWriter(sys.argv[1]) as writer:
    for number in range(10**9):
        step = EnvironmentStep(0, (), "o" * 2000, "a", "n", float(number))
        writer.write(Rollout(f"r{number}", (step,)))
"""


@pytest.mark.integration
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
@pytest.mark.filterwarnings("ignore::ludic.rollouts.CutFileWarning")
def test_a_killed_run_leaves_a_file_that_can_be_read_and_continued(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"r{suffix}"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or path.stat().st_size < 20_000:
            assert time.monotonic() < deadline, "the writer wrote nothing"
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    found = list(read_rollouts(path))
    assert len(found) > 5
    assert [r.id for r in found] == [f"r{i}" for i in range(len(found))]
    with RolloutWriter(path, append=True) as writer:
        writer.write(found[0])
    assert [r.id for r in read_rollouts(path)] == [*(r.id for r in found), "r0"]
