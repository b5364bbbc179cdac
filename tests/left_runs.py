"""Tests that leave run folders in the checkout fail the session."""

from __future__ import annotations

from pathlib import Path

import pytest


class LeftRuns:
    """Looks at a folder of runs before the first test and after the last. Of several processes,
    only the one that the others are workers of looks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.before = folder, self._names(folder)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        left = self._names(self.folder) - self.before
        if left and not hasattr(session.config, "workerinput"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            names = ", ".join(sorted(left))
            print(f"\nFAILED: tests left {names} in {self.folder}: let them work elsewhere")

    @staticmethod
    def _names(folder: Path) -> set[str]:
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
