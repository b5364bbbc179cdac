"""The examples' scripts in this process: a process for each would start torch each time."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES_FOLDER = Path(__file__).resolve().parents[2] / "examples"


def run_script(path: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python examples/PATH …` in the working directory."""
    monkeypatch.setattr(sys, "argv", [path, *arguments])
    sys.path.insert(0, str((EXAMPLES_FOLDER / path).parent))
    runpy.run_path(str(EXAMPLES_FOLDER / path), run_name="__main__")


@pytest.fixture
def process_as_it_was() -> Iterator[None]:
    """A run sets the number of threads, and puts the folder of its modules on the path."""
    threads, path = torch.get_num_threads(), list(sys.path)
    yield
    torch.set_num_threads(threads)
    sys.path[:] = path
