"""How long a launched run takes to its first group, and a killed actor to its return.

python -m benchmarks.cluster [--engine ray]

With `--engine ray`, on the Ray cluster that runs here or that RAY_ADDRESS names. The last line is
one JSON object; seconds are from the start of `ludic launch`, and from the kill.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ludic.errors import PipelineError
from ludic.pipeline.status import PipelineStatus, read_status
from ludic.pipeline.store import Store
from ludic.runs.locate import read_run
from ludic.runs.pipeline.address import find_pipeline

NEEDS = ("redis",)
WAIT_S = 600.0
SMALL = (
    *("sft.steps=0", "training.steps=1000", "training.rollouts_per_update=16", "eval.episodes=4"),
    *('model.device="cpu"', 'logging.loggers=["console"]'),
)


def status_of(folder: Path) -> PipelineStatus | None:
    """How the run stands; None while nobody can say."""
    if not (folder / "pipeline.json").is_file():
        return None
    config, _, _ = read_run(folder)
    store = Store(find_pipeline(config, folder))
    try:
        return read_status(store)
    except PipelineError:
        return None
    finally:
        store.close()


def until(happened: Callable[[], Any], what: str) -> float:
    """Waits for it, and returns how many seconds that took."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > WAIT_S:
            raise SystemExit(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.1)
    return time.monotonic() - began


def measure(folder: Path, engine: str) -> dict[str, float | str]:
    """Launches a run, kills an actor of it, and ends it."""
    table = f'cluster={{engine="{engine}", actors_min=1}}'
    command = [sys.executable, "-m", "ludic", "launch", "tic-tac-toe", "--out", str(folder)]
    with open(folder.with_suffix(".log"), "wb") as log:
        driver = subprocess.Popen([*command, table, *SMALL], stdout=log, stderr=log)
    try:

        def groups() -> int:
            if driver.poll() is not None:
                raise SystemExit(folder.with_suffix(".log").read_text())
            status = status_of(folder)
            return 0 if status is None else status.total_groups

        first_s = until(groups, "the first group")
        status = status_of(folder)
        assert status is not None
        killed = int(status.actors[0].facts["pid"])
        os.kill(killed, signal.SIGKILL)

        def returned() -> bool:
            status = status_of(folder)
            return status is not None and any(a.facts["pid"] != killed for a in status.actors)

        return_s = until(returned, "the actor's return")
    finally:
        driver.kill()
        driver.wait()
    return {
        "engine": engine,
        "launch_to_first_group_s": round(first_s, 1),
        "kill_to_return_s": round(return_s, 1),
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    engine = parser.parse_args().engine
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        print(json.dumps(measure(Path(temporary, "run"), engine)))


if __name__ == "__main__":
    main()
