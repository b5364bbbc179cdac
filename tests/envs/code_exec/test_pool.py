"""The pool: bounded, working after failures, and nothing left behind when its process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ludic.envs.code_exec.sandbox.base import Limits, RunStatus, SandboxError
from ludic.envs.code_exec.sandbox.pool import SandboxPool
from ludic.errors import ConfigError, DeadlineError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:the sandbox 'plain':RuntimeWarning"),
]
MAIN = ["python", "main.py"]


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_as_many_run_at_once_as_there_are_workers(pool: SandboxPool) -> None:
    meet = b"import time\nprint(time.time())\ntime.sleep(0.5)\nprint(time.time())"
    times: list[tuple[float, float]] = []

    def go() -> None:
        first, last = pool.run({"main.py": meet}, MAIN).stdout.split()
        times.append((float(first), float(last)))

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(times) == 4
    for moment, _ in times:
        assert sum(first <= moment < last for first, last in times) <= pool.workers


def test_a_worker_that_was_killed_is_replaced_and_its_program_run_again(pool: SandboxPool) -> None:
    pool.run({}, ["true"])
    with pool.lease() as (sandbox,):
        pid = sandbox.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for _ in range(3):
        assert pool.run({"main.py": b"print(1)"}, MAIN).stdout == b"1\n"


class Broken:
    """A sandbox that cannot start."""

    name = "broken"
    starts = 0

    def start(self) -> None:
        Broken.starts += 1
        raise SandboxError("it does not start")

    def close(self) -> None:
        pass


def test_the_breaker_opens_after_failures_in_a_row_and_closes_again() -> None:
    Broken.starts = 0
    pool = SandboxPool(Broken, workers=1, breaker_failures=3, breaker_s=3600)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(SandboxError):
            pool.run({}, ["true"])
    assert Broken.starts == 3
    with pytest.raises(SandboxError, match="failed one after another"):
        pool.run({}, ["true"])
    assert Broken.starts == 3
    pool._open_until -= 3600
    with pytest.raises(SandboxError, match="does not start"):
        pool.run({}, ["true"])
    assert Broken.starts == 4
    pool.close()


def test_a_wait_for_a_turn_has_an_end() -> None:
    pool = SandboxPool("plain", workers=1, queue_s=0.05)
    with pool.lease(), pytest.raises(DeadlineError, match="its turn"):
        pool.run({}, ["true"])
    pool.close()
    with pytest.raises(SandboxError, match="closed"):
        pool.run({}, ["true"])


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="workers=0"):
        SandboxPool("plain", workers=0)


def test_nothing_of_one_program_is_seen_by_the_next(pool: SandboxPool) -> None:
    leave = b"import builtins, os, sys\nbuiltins.left = 1\nsys.left = 1\nos.environ['LEFT'] = '1'"
    look = (
        leave.split(b"\n")[0]
        + b"""
print(hasattr(builtins, 'left'), hasattr(sys, 'left'), 'LEFT' in os.environ)"""
    )
    with pool.lease() as (sandbox,):
        sandbox.run({"main.py": leave}, MAIN)
        assert sandbox.run({"main.py": look}, MAIN).stdout == b"False False False\n"


def test_programs_do_not_share_their_random_numbers(pool: SandboxPool) -> None:
    roll = b"import random; print(random.random())"
    with pool.lease() as (sandbox,):
        rolls = {sandbox.run({"main.py": roll}, MAIN).stdout for _ in range(3)}
    assert len(rolls) == 3


HOST = """
    import threading, time, warnings
    warnings.simplefilter("ignore")
    from ludic.envs.code_exec.sandbox.base import Limits
    from ludic.envs.code_exec.sandbox.pool import SandboxPool
    pool = SandboxPool({name!r}, workers=2)
    program = b"import os, time\\nos.fork() or os.setsid()\\nopen('left', 'w')\\ntime.sleep(500)"
    go = lambda: pool.run({{"main.py": program}}, ["python", "main.py"], b"", Limits(wall_s=400))
    for _ in range(2): threading.Thread(target=go, daemon=True).start()
    def busy(sandbox):
        return sandbox._worker is not None and sandbox._worker.busy
    while len(pool._leased) < 2 or not all(map(busy, list(pool._leased))):
        time.sleep(0.05)
    time.sleep(1.0)
    print("running", flush=True)
    time.sleep(400)
"""


def below(pid: int) -> set[int]:
    """Every process that descends from `pid`."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found: set[int] = set()
    fresh = {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh}
        found |= fresh
    return found


@pytest.mark.parametrize("name", ["bubblewrap", "plain"])
def test_nothing_is_left_when_the_process_is_killed(name: str) -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    mounts = len(Path("/proc/mounts").read_text().splitlines())
    host = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOST.format(name=name))],
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TMPDIR": str(folder),
        },
    )
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == b"running\n"
        started = below(host.pid)
        assert len(started) >= 6
    finally:
        host.kill()
        host.wait(timeout=10)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    eventually(lambda: not list(folder.iterdir()))
    folder.rmdir()
    assert len(Path("/proc/mounts").read_text().splitlines()) == mounts


@pytest.mark.sandbox
def test_closing_ends_what_still_runs() -> None:
    pool = SandboxPool(workers=1)
    failed: list[Exception] = []

    def go() -> None:
        try:
            pool.run({"main.py": b"import time; time.sleep(300)"}, MAIN, b"", Limits(wall_s=300))
        except SandboxError as error:
            failed.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    eventually(lambda: bool(pool._leased) and all(
        s._worker is not None and s._worker.busy
        for s in pool._leased
    ))  # fmt: skip
    pool.close()
    thread.join(30)
    assert not thread.is_alive()
    assert failed


def test_a_status_is_a_word() -> None:
    assert str(RunStatus.WALL_TIME) == "wall_time"
