"""Programs as processes: what they get, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from pathlib import Path

import pytest

from ludic.agents.programs.processes import MAX_OUTPUT_BYTES, Ended, environment, run_process
from tests.envs.waiting import eventually

pytestmark = pytest.mark.integration

ESCAPE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
"""


async def run(
    code: str, *arguments: str, stdin: str = "", timeout_s: float | None = 60.0, mark: str = ""
) -> Ended:
    mark = mark or secrets.token_urlsafe(16)
    return await run_process(
        [sys.executable, "-c", code, *arguments],
        stdin=stdin,
        env=environment({"MARK": mark}, ()),
        cwd=None,
        mark=mark,
        timeout_s=timeout_s,
    )


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    await eventually(lambda: not is_alive(pid) or time.monotonic() > deadline)
    return not is_alive(pid)


async def test_input_output_and_status_go_through() -> None:
    code = "import sys; print(sys.stdin.read().upper()); print('oh', file=sys.stderr); sys.exit(3)"
    assert await run(code, stdin="grüße") == Ended(3, "GRÜSSE\n", "oh\n")


async def test_a_program_need_not_read_its_input() -> None:
    assert (await run("print('done')", stdin="x" * 1_000_000)).stdout == "done\n"


async def test_output_without_end_is_cut_and_of_the_errors_the_end_is_kept() -> None:
    ended = await run(
        "import sys; print('x' * 3_000_000); print('e' * 100_000 + 'last', file=sys.stderr)"
    )
    assert len(ended.stdout) == MAX_OUTPUT_BYTES
    assert ended.stderr.endswith("last\n")
    assert len(ended.stderr) <= 4096


async def test_a_deadline_ends_the_program_and_its_children(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid)); child.wait()"
    )
    for seconds in (2.0, 8.0, 32.0):  # a slow machine may need longer to come that far
        ended = await run(code, timeout_s=seconds)
        assert ended.status is None
        if note.exists():
            break
    assert await gone(int(note.read_text()))


async def test_a_child_that_left_the_group_is_ended_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    ended = await run(ESCAPE, str(note))
    assert ended.status == 0
    assert await gone(int(note.read_text()))


async def test_cancelling_ends_the_program(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    task = asyncio.create_task(run(code))
    await eventually(lambda: note.exists() and bool(note.read_text()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(int(note.read_text()))


async def test_a_signal_is_a_negative_status() -> None:
    assert (await run("import os; os.kill(os.getpid(), 9)")).status == -9


async def test_secrets_of_this_process_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "hush")
    monkeypatch.setenv("MY_KEY", "given")
    found = environment({"MARK": "m"}, ["MY_KEY"])
    assert "MY_SECRET" not in found
    assert (found["MY_KEY"], found["MARK"]) == ("given", "m")
    assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
