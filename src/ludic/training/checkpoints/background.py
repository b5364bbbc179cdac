"""Writes that go on while training does, with a deadline."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from ludic.errors import CheckpointError


class BackgroundWriter:
    """Runs one write at a time in a thread.

    The thread is a daemon, so a disk that hangs cannot keep the process from ending; a write that
    is still running at exit is waited for, up to the deadline. `start` and `finish` are called
    from one thread at a time, and the write touches nothing of this object but its future.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder, self.timeout_s = folder, timeout_s
        self._writing: Future[None] | None = None
        self._hung: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Starts `write`. Raises `CheckpointError` while one that missed its deadline runs."""
        self.finish()
        if self._hung is not None and not self._hung.done():
            raise self._error()
        writing = self._writing = Future()

        def work() -> None:
            try:
                write()
            except BaseException as exc:
                writing.set_exception(exc)
            else:
                writing.set_result(None)

        Thread(target=work, name="ludic-checkpoint", daemon=True).start()
        atexit.register(self.finish)

    def finish(self) -> None:
        """Waits for the write that is running, and raises what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        atexit.unregister(self.finish)
        try:
            failure = writing.exception(self.timeout_s)
        except TimeoutError:
            self._hung = writing
            raise self._error() from None
        if failure is not None:
            raise failure

    def _error(self) -> CheckpointError:
        return CheckpointError(
            f"waited {self.timeout_s:.3g} s for a checkpoint to be written to {self.folder}, and "
            "the disk has not answered: check it, or move the run's folder to a faster one. "
            "Earlier checkpoints are complete, and the run can be resumed from them"
        )
