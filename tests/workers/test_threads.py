"""Worker threads: what is given up stays given up."""

from __future__ import annotations

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
