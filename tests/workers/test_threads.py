"""Worker threads: what is given up stays given up."""

from __future__ import annotations

import sys
import threading

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
