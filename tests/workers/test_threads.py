"""Worker threads: what is given up stays given up."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from functools import partial
from operator import mul
from typing import Any

import pytest

from ludic.errors import DeadlineError
from ludic.workers.threads import EnvThreads
from tests.envs.waiting import eventually


async def test_a_call_that_finishes_while_it_is_being_given_up_has_no_result() -> None:
    threads = EnvThreads()
    released, returned = threading.Event(), threading.Event()

    def on_abandon() -> None:
        released.set()
        assert returned.wait(60)  # the call has finished before `run` goes on

    with pytest.raises(DeadlineError):
        await threads.run(
            lambda: released.wait(60),
            what="an answer",
            whom="a slow call",
            timeout_s=0.01,
            on_abandon=on_abandon,
            on_return=returned.set,
        )
    await eventually(lambda: threads.abandoned == 0)


async def test_an_abandoned_call_that_comes_back_is_no_longer_counted_however_it_ends() -> None:
    threads = EnvThreads()
    released = threading.Event()
    with pytest.raises(DeadlineError):
        await threads.run(
            lambda: released.wait(60),
            what="an answer",
            whom="a slow call",
            timeout_s=0.01,
            on_return=lambda: sys.exit(1),
        )
    assert threads.abandoned == 1
    released.set()
    await eventually(lambda: threads.abandoned == 0)


async def test_a_thread_that_could_not_be_started_takes_nobodys_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = EnvThreads(max_threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot_start)
        with pytest.raises(RuntimeError, match="can't start"):
            await threads.run(lambda: 1, what="an answer", whom="a call", timeout_s=60)
    assert await threads.run(lambda: 2, what="an answer", whom="a call", timeout_s=60) == 2


async def test_calls_that_wait_for_each_other_all_get_a_thread_among_quick_ones() -> None:
    threads = EnvThreads()
    for _ in range(3):  # with new threads, and then with idle ones
        meet = partial(threading.Barrier(30).wait, 60)
        calls = [meet if n % 2 else partial(mul, n, 1) for n in range(60)]
        answers = await asyncio.gather(
            *(threads.run(call, what="an answer", whom="a call", timeout_s=90) for call in calls)
        )
        assert sorted(answers[1::2]) == list(range(30))
        assert answers[::2] == list(range(0, 60, 2))


def test_every_loop_hears_of_its_own_calls_however_many_end_at_once() -> None:
    threads, answers = EnvThreads(), dict[int, list[int]]()

    async def call_all(sign: int) -> None:
        calls = (
            threads.run(partial(mul, sign, n), what="a number", whom="a call", timeout_s=60)
            for n in range(100)
        )
        answers[sign] = await asyncio.gather(*calls)

    callers = [threading.Thread(target=asyncio.run, args=(call_all(sign),)) for sign in (-1, 1)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert answers == {sign: [sign * n for n in range(100)] for sign in (-1, 1)}


async def test_answers_that_come_before_the_loop_looks_wake_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, loop, gate, woken = EnvThreads(), asyncio.get_running_loop(), threading.Event(), []
    call_soon = loop.call_soon_threadsafe

    def wake(*args: Any) -> None:
        woken.append(args)
        call_soon(*args)

    def hold_up_the_loop() -> None:
        gate.set()
        while len(threads._answered.get(loop, ())) < 8:
            time.sleep(0.001)

    monkeypatch.setattr(loop, "call_soon_threadsafe", wake)
    calls = [
        asyncio.create_task(threads.run(gate.wait, what="a gate", whom="a call", timeout_s=60))
        for _ in range(8)
    ]
    await asyncio.sleep(0)
    hold_up_the_loop()
    assert await asyncio.gather(*calls) == [True] * 8
    assert len(woken) == 1


def test_a_loop_that_is_closed_before_it_hears_of_an_answer_is_forgotten() -> None:
    threads, gate = EnvThreads(), threading.Event()

    def leave_a_call_alone(loop: asyncio.AbstractEventLoop) -> weakref.ref[Any]:
        async def begin() -> asyncio.Task[Any]:
            call = threads.run(gate.wait, what="a gate", whom="a call", timeout_s=None)
            task = asyncio.create_task(call)
            await asyncio.sleep(0)
            return task

        task: Any = loop.run_until_complete(begin())
        task._log_destroy_pending = False
        gate.set()
        asyncio.run(eventually(lambda: len(threads._idle) == 1))
        loop.close()
        return weakref.ref(loop)

    left = leave_a_call_alone(asyncio.new_event_loop())
    calls = threads.run(lambda: 1, what="an answer", whom="a call", timeout_s=60)
    assert asyncio.run(calls) == 1
    gc.collect()
    assert left() is None
