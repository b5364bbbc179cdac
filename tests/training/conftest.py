"""Where these tests work."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _elsewhere(elsewhere: Path) -> None:
    """A trainer that was told no `run_dir` makes a folder below the working directory."""
