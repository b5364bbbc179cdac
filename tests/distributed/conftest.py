"""What tests of publishing share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.virtual_time import virtual_time


@pytest.fixture
async def clock() -> AsyncIterator[None]:
    """Deadlines pass when nothing else can happen: no test has to wait for them, or be quick."""
    with virtual_time():
        yield
