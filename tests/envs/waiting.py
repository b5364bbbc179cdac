"""Waiting for what another thread or process does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits until `condition()` holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # nobody there to set an event
            await asyncio.sleep(0.005)
