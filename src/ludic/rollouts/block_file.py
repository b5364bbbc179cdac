"""A file of blocks that is appended to: what the logs of rollouts and of tokens have in common."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

from ludic.errors import ConfigError
from ludic.rollouts.block_writer import BlockWriter
from ludic.rollouts.lines import mend_last_line

T = TypeVar("T")


class BlockFile(Generic[T]):
    """Appends items to a file, in blocks, from a thread of its own. An existing file is refused
    unless `append` is true; then what an earlier run left unfinished at its end is cut off."""

    def __init__(
        self,
        path: str | Path,
        encode: Callable[[T], bytes],
        *,
        append: bool = False,
        max_waiting: int = 1024,
    ) -> None:
        self.path = Path(path)
        if self.path.exists():
            if not append:
                raise ConfigError(
                    f"{self.path} already exists: choose another path, or "
                    f"{type(self).__name__}(path, append=True)"
                )
            mend_last_line(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._blocks = BlockWriter(self.path, encode, max_waiting=max_waiting)
        weakref.finalize(self, self._blocks.close_at_exit)

    @property
    def lost(self) -> int:
        """How many items were left out so far because they cannot be encoded."""
        return self._blocks.lost

    def flush(self) -> None:
        """Returns when everything written so far is on disk."""
        self._blocks.flush()

    async def flush_async(self) -> None:
        """`flush` without holding up the event loop."""
        await self._blocks.flush_async()

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        self._blocks.close()

    async def aclose(self) -> None:
        """`close` without holding up the event loop."""
        try:
            await self._blocks.flush_async()
        finally:
            self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as error:
            self._beside(exc, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        except Exception as error:
            self._beside(exc, error)

    def _beside(self, exc: BaseException | None, error: Exception) -> None:
        """Raises `error`, unless `exc` is on its way already: then says it in a note."""
        if exc is None:
            raise error
        if exc is not error:
            exc.add_note(f"{self.path}: not everything was written: {error}")
