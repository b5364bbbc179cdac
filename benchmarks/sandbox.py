"""Executions per second of a trivial program in the sandbox: `python -m benchmarks.sandbox`.

The program prints one number. Warm is a worker that waits in its sandbox, cold is a sandbox that
is started for the program and closed after it, and the bare `subprocess.run` has no sandbox at all.
The three take turns, so that a busy machine is busy for all of them; each figure is the median of
the rounds. `warm_vs_subprocess` is the time of a warm run over that of the bare one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ludic.envs.code_exec.sandbox.bubblewrap import BubblewrapSandbox
from ludic.envs.code_exec.sandbox.pool import SandboxPool

NEEDS = ("bwrap",)
PROGRAM = b"print(42)\n"
COMMAND = ["python", "main.py"]


def timed(work: Callable[[], object], times: int) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def warm(pool: SandboxPool) -> None:
    assert pool.run({"main.py": PROGRAM}, COMMAND).stdout == b"42\n"


def cold() -> None:
    with BubblewrapSandbox() as sandbox:
        assert sandbox.run({"main.py": PROGRAM}, COMMAND).stdout == b"42\n"


def bare(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, check=True)
    assert done.stdout == b"42\n"


def at_once(pool: SandboxPool, workers: int, times: int) -> float:
    """Executions per second with that many threads."""
    threads = [
        threading.Thread(target=timed, args=(lambda: warm(pool), times)) for _ in range(workers)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return workers * times / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the sandbox.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--times", type=int, default=20, help="executions per round")
    args = parser.parse_args()
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory() as folder, SandboxPool(workers=2) as pool:
        path = Path(folder) / "main.py"
        path.write_bytes(PROGRAM)
        at_once(pool, 2, 1)  # starts both
        warm(pool)
        for _ in range(args.rounds):
            note("subprocess_s", timed(lambda: bare(path), args.times))
            note("warm_s", timed(lambda: warm(pool), args.times))
            note("cold_s", timed(cold, max(1, args.times // 10)))
            for workers in (1, 2):
                note(f"per_s_{workers}", at_once(pool, workers, args.times))
    found = {name: statistics.median(values) for name, values in figures.items()}
    ratio = found["warm_s"] / found["subprocess_s"]
    print(f"bare subprocess.run   {1000 * found['subprocess_s']:8.1f} ms")
    print(
        f"warm sandbox          {1000 * found['warm_s']:8.1f} ms   {ratio:.2f} times the bare one"
    )
    print(f"cold sandbox          {1000 * found['cold_s']:8.1f} ms")
    for workers in (1, 2):
        print(
            f"{workers} at once, warm       {found[f'per_s_{workers}']:8.1f} executions per second"
        )
    result = {
        "warm_vs_subprocess": round(ratio, 3),
        "per_s": round(found["per_s_1"], 1),
        "per_s_2_workers": round(found["per_s_2"], 1),
        "warm_ms": round(1000 * found["warm_s"], 2),
        "cold_ms": round(1000 * found["cold_s"], 2),
        "subprocess_ms": round(1000 * found["subprocess_s"], 2),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
