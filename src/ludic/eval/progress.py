"""A bar over an evaluation's episodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ludic.rollouts.progress import Progress, ProgressCallback

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def episodes_bar(title: str, console: Console | None = None) -> Iterator[ProgressCallback]:
    """Shows a progress bar over episodes, for `on_progress`; without a terminal, one line at the
    end. On the standard error unless there is a `console`: results go to the standard output."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    shown = Console(stderr=True) if console is None else console
    with Bar(*columns, TimeElapsedColumn(), console=shown) as bar:
        task = bar.add_task(title, total=None)

        def update(progress: Progress) -> None:
            bar.update(task, total=progress.total, completed=progress.finished)

        yield update
