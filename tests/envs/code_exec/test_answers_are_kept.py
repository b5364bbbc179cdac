"""Attacks that once earned a reward, went past a limit or hurt the host: each does so no more."""

from __future__ import annotations

import json
import select
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ludic.envs.code_exec import (
    CodeExecEnv,
    FunctionTask,
    IOCase,
    Judge,
    Limits,
    Outcome,
    PythonTool,
    ResultCache,
    RunResult,
    RunStatus,
    SandboxPool,
    StdioTask,
    extract_code,
    make_verifier,
)
from ludic.envs.code_exec.sandbox.pool import Role
from tests.envs.code_exec.test_pool import below, eventually

pytestmark = [pytest.mark.integration]

READS_MEMORY = r"""
import os, re
WANTED = re.compile(b"sec" + b"ret-[0-9]{5}")
found = []
mem = os.open("/proc/self/mem", os.O_RDONLY)
for line in open("/proc/self/maps"):
    span, rights = line.split()[:2]
    if rights[0] == "r" and "[v" not in line:
        at, end = (int(n, 16) for n in span.split("-"))
        try: found += WANTED.findall(os.pread(mem, end - at, at))
        except OSError: pass
"""
READS_FRAMES = r"""
import re, sys
found, frame = [], sys._getframe()
while frame:
    found += re.findall("sec" + "ret-[0-9]{5}", repr(frame.f_locals))
    for value in list(frame.f_locals.values()):
        if hasattr(value, "__dict__"):
            found += re.findall("sec" + "ret-[0-9]{5}", repr(vars(value)))
    frame = frame.f_back
"""
SAYS = """
word = found[0] if found else "nothing"
word = word if isinstance(word, str) else word.decode()
print(word)
"""
CHECKER = """
output, expected = (open(f"{name}.txt").read().strip() for name in ("output", "expected"))
raise SystemExit(output != expected)
"""


@pytest.fixture
def one() -> Iterator[SandboxPool]:
    with SandboxPool(workers=1) as pool:
        yield pool


def judge_of(pool: SandboxPool, **options: Any) -> Judge:
    return Judge(pool, make_verifier("whitespace"), Limits(), "bubblewrap", **options)


@pytest.mark.sandbox
@pytest.mark.parametrize("reads", [READS_MEMORY, READS_FRAMES], ids=["memory", "frames"])
@pytest.mark.parametrize("checker", [None, CHECKER], ids=["compared", "checker"])
def test_the_second_episode_finds_no_expected_output(
    one: SandboxPool, reads: str, checker: str | None
) -> None:
    task = StdioTask("", (IOCase("", "secret-48151"), IOCase("", "secret-62342")), checker)
    judge = judge_of(one, all_tests=True)
    for _ in range(3):
        assert judge(task, reads + SAYS).passed == 0
        assert judge(task, "print('secret-' + '48151')").passed == 1


@pytest.mark.sandbox
@pytest.mark.parametrize("reads", [READS_MEMORY, READS_FRAMES], ids=["memory", "frames"])
def test_no_solution_finds_asserts_of_its_tests_or_of_others(one: SandboxPool, reads: str) -> None:
    tests = tuple(f"assert f({n}) == 'secret-{n:05}'" for n in range(12))
    task = FunctionTask("", "f", tests)
    looks = "\n".join(f"    {line}" for line in (reads + SAYS).splitlines())
    cheat = f"def f(n):\n{looks}\n    return word"
    judge = judge_of(one, all_tests=True)
    for _ in range(2):
        assert judge(task, cheat).passed == 0
        assert judge(task, "def f(n): return f'secret-{n:05}'").passed == 12


@pytest.mark.sandbox
@pytest.mark.parametrize("reads", [READS_MEMORY, READS_FRAMES], ids=["memory", "frames"])
def test_no_program_replays_what_another_one_wrote(one: SandboxPool, reads: str) -> None:
    for _ in range(3):
        honest = one.run({"main.py": b"print('secret-' + '31337')"}, ["python", "main.py"])
        assert honest.stdout == b"secret-31337\n"
        cheat = one.run({"main.py": (reads + SAYS).encode()}, ["python", "main.py"])
        assert cheat.stdout == b"nothing\n", cheat.stderr


def resident_mb(pid: int) -> float:
    total = 0
    for child in (pid, *below(pid)):
        try:
            text = Path(f"/proc/{child}/status").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if "RssAnon" in line)
    return total / 1024


FLOODS = rb"""
import os, threading, time
def hog():
    kept = []
    while HOG:
        kept.append(bytearray(os.urandom(1) * (10 << 20)))
        time.sleep(0.02)
threading.Thread(target=hog, daemon=True).start()
while True: os.write(1, b'[],' * 20000)
"""


@pytest.mark.sandbox
@pytest.mark.parametrize("limit", [RunStatus.MEMORY, RunStatus.WALL_TIME], ids=str)
def test_limits_hold_while_nobody_reads_what_a_program_writes(
    one: SandboxPool, limit: RunStatus
) -> None:
    hogs = limit is RunStatus.MEMORY
    limits = Limits(wall_s=300 if hogs else 3, cpu_s=300, memory_mb=128, output_kb=1 << 20)
    with one.lease() as (sandbox,):
        pid = sandbox.worker_pid
        assert pid is not None
        idle, peak = len(below(pid)), 0.0
        source = FLOODS.replace(b"HOG", str(hogs).encode())
        program = sandbox.open({"main.py": source}, ["python", "main.py"], limits)
        eventually(lambda: len(below(pid)) >= idle + 3)  # a supervisor, an init, and the program
        deadline = time.monotonic() + 100
        while len(below(pid)) > idle + 1:
            peak = max(peak, resident_mb(pid))
            assert time.monotonic() < deadline, f"the limit on {limit} did not hold"
            time.sleep(0.02)
        assert peak < 500
        assert program.finish().status is limit


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "writes",
    ["b'[],' * (16 << 20) + b'\\n'", "b'[' * 200000 + b'\\n'", "b'\"' + b'x' * 50000 + b'\"\\n'",
     "b'{' * 99 + b'\\n'", "b'\\xff\\xfe\\n'", "b'x' * (48 << 20)"],
    ids=["wide", "deep", "long", "broken", "binary", "endless"],
)  # fmt: skip
def test_what_a_session_writes_to_its_pipe_costs_the_host_nothing(writes: str) -> None:
    tool = PythonTool(call_s=60)
    tracemalloc.start()
    try:
        said = tool(
            f"import os\ndata = {writes}\nfor fd in (3, 4):\n"
            "    rest = memoryview(data)\n"
            "    try:\n        while rest: rest = rest[os.write(fd, rest):]\n"
            "    except OSError: pass"
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        tool.close()
    assert "session ended" in said.lower()
    assert peak < 24 << 20


@pytest.mark.sandbox
def test_text_that_cannot_be_encoded_is_cleaned_where_it_comes_in(bubblewrap: SandboxPool) -> None:
    judge = judge_of(bubblewrap)
    task = FunctionTask("", "f", ("assert f(1) == 1",))
    bad = r"raise Exception('\ud800 bad')"
    for answer in (bad, f"def f(x):\n    {bad}"):
        message = judge(task, answer).message
        assert "bad" in message
        message.encode()
    judge(StdioTask("", (IOCase("", "1"),)), bad).message.encode()
    env = CodeExecEnv(rows=[{"prompt": "", "inputs": [""], "outputs": ["1"]}], max_attempts=2)
    env.reset(seed=0)
    json.dumps(env.env_step(bad).obs, ensure_ascii=False).encode()
    tool = PythonTool()
    assert "bad" in tool(bad)
    tool(bad).encode()
    assert tool(r"print('\ud800')") == "?\n"
    tool.close()


@pytest.mark.sandbox
def test_the_words_of_a_failed_assert_are_not_passed_on(bubblewrap: SandboxPool) -> None:
    judge = judge_of(bubblewrap)
    tests = (
        "assert f(1) == 2, 'it should be 31337'",
        "{'31337': 1}[f(1)]",
        "raise ValueError('31337')",
        "f(1) + [31337]",
    )
    for test in tests:
        verdict = judge(FunctionTask("", "f", (test,)), "def f(x): return 'x'")
        assert verdict.passed == 0
        assert "31337" not in verdict.message
    verdict = judge(FunctionTask("", "f", tests), "def f(x): raise ValueError('my own words')")
    assert "my own words" in verdict.message


class Slow:
    """A pool on a machine that is busy for the first answers."""

    def __init__(self, busy: int) -> None:
        self.busy = busy
        self.alone: list[bool] = []

    def run(self, *args: Any, alone: bool = False, **options: Any) -> RunResult:
        self.alone.append(alone)
        if len(self.alone) <= self.busy:
            return RunResult(RunStatus.WALL_TIME, None, b"", b"", wall_s=10.0, cpu_s=1.0)
        return RunResult(RunStatus.OK, 0, b"1", b"", wall_s=1.0, cpu_s=1.0)


def test_a_verdict_of_a_busy_moment_is_sought_once_more_and_not_remembered() -> None:
    task = StdioTask("", (IOCase("", "1"),))
    pool: Any = Slow(busy=1)
    judge = judge_of(pool, cache=ResultCache())
    assert judge(task, "print(1)").outcome is Outcome.PASSED
    assert pool.alone == [False, True]
    pool = Slow(busy=2)
    judge = judge_of(pool, cache=ResultCache())
    assert judge(task, "print(1)").status == "wall_time"
    assert pool.alone == [False, True]
    assert judge(task, "print(1)").outcome is Outcome.PASSED
    assert pool.alone == [False, True, False]
    assert judge(task, "print(1)").outcome is Outcome.PASSED
    assert len(pool.alone) == 3, "this one lasts"


def test_a_budget_counts_the_time_that_programs_ran_and_is_not_remembered() -> None:
    task = StdioTask("", tuple(IOCase("", "1") for _ in range(9)))
    pool: Any = Slow(busy=0)
    cache: ResultCache[Any] = ResultCache()
    judge = judge_of(pool, cache=cache, budget_s=2.5, all_tests=True)
    verdict = judge(task, "print(1)")
    assert (verdict.passed, verdict.status) == (3, "budget")
    assert len(cache) == 0


def test_a_program_that_computed_all_the_time_is_not_tried_again() -> None:
    pool: Any = Slow(busy=0)
    busy = RunResult(RunStatus.WALL_TIME, None, b"", b"", wall_s=10.0, cpu_s=9.8)
    pool.run = lambda *args, alone=False, **options: pool.alone.append(alone) or busy
    judge = judge_of(pool, cache=ResultCache())
    assert judge(StdioTask("", (IOCase("", "1"),)), "while True: pass").status == "wall_time"
    assert pool.alone == [False]


@pytest.mark.sandbox
def test_a_checker_that_runs_out_of_time_rejects_but_is_not_remembered(one: SandboxPool) -> None:
    task = StdioTask("", (IOCase("", "1"),), "import time\ntime.sleep(300)")
    cache: ResultCache[Any] = ResultCache()
    judge = Judge(one, make_verifier("exact"), Limits(wall_s=1), "bubblewrap", cache=cache)
    verdict = judge(task, "print(1)")
    assert (verdict.outcome, verdict.status, verdict.late) == (Outcome.FAILED, "checker", True)
    assert len(cache) == 0


@pytest.mark.sandbox
def test_one_that_runs_alone_waits_for_the_others_and_they_for_it() -> None:
    running: list[str] = []
    seen: list[list[str]] = []

    def work(name: str) -> Any:
        def go(_: object) -> None:
            running.append(name)
            time.sleep(0.1)
            seen.append(list(running))
            running.remove(name)

        return go

    with SandboxPool(workers=2) as pool:
        threads = [
            threading.Thread(target=pool.attempt, args=(work(name),), kwargs={"alone": alone})
            for name, alone in [("a", False), ("b", False), ("X", True), ("c", False), ("Y", True)]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(seen) == 5
    assert all(names in (["X"], ["Y"]) for names in seen if {"X", "Y"} & set(names))


@pytest.mark.sandbox
def test_programs_and_judges_never_share_a_sandbox(one: SandboxPool) -> None:
    seen: dict[Role, set[int]] = {"program": set(), "judge": set()}
    both: tuple[Role, Role] = ("program", "judge")
    for _ in range(3):
        for roles in (both[:1], both[1:], both):
            with one.lease(roles) as boxes:
                for role, sandbox in zip(roles, boxes, strict=True):
                    seen[role].add(id(sandbox))
    assert len(seen["program"]) == len(seen["judge"]) == 1
    assert not seen["program"] & seen["judge"]


@pytest.mark.sandbox
def test_a_worker_outlives_a_program_that_ended_before_it_was_killed(one: SandboxPool) -> None:
    with one.lease() as (sandbox,):
        worker = sandbox._worker
        assert worker is not None
        for _ in range(3):
            program = sandbox.open({"main.py": b"print(1)"}, ["python", "main.py"])
            assert program.receive_line(60) == b"1\n"
            assert worker._program is not None
            ended = select.poll()
            ended.register(worker._program._end, select.POLLHUP)
            assert ended.poll(60_000)
            assert program.kill().status is RunStatus.OK
        assert sandbox._worker is worker


@pytest.mark.sandbox
def test_a_program_that_is_killed_before_it_began_is_killed_all_the_same(one: SandboxPool) -> None:
    with one.lease() as (sandbox,):
        for _ in range(20):
            program = sandbox.open({"main.py": b"input()"}, ["python", "main.py"])
            assert program.kill().status is RunStatus.KILLED


@pytest.mark.parametrize(
    "answer", ["```a\n" * 40_000, "`" * 100_000 + "\nx\n" * 40_000, "~~~\n```\n" * 30_000],
    ids=["unclosed", "long fence", "mixed"],
)  # fmt: skip
def test_no_answer_takes_long_to_find_the_code_in(answer: str) -> None:
    start = time.process_time()
    extract_code(answer)
    assert time.process_time() - start < 20
