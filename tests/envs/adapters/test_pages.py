"""The code on the adapters' page runs, where the packages are."""

from __future__ import annotations

import contextlib
import inspect
import io
from pathlib import Path

import pytest

from tests.test_docs import blocks_of, code_of, text_of

pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore::SyntaxWarning")]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "adapters.md"


async def test_the_code_on_the_page_of_adapters_runs_and_prints_what_it_says() -> None:
    names: dict[str, object] = {}
    printed = io.StringIO()
    ran = 0
    for block in blocks_of(text_of(PAGE)):
        words = block.info.split()
        if words == ["text", "adapters", "output"]:
            assert printed.getvalue().strip() == block.code.strip()
            printed = io.StringIO()
        elif words == ["python", "no-run", "adapters"]:
            with contextlib.redirect_stdout(printed):
                result = eval(code_of(block, PAGE), names)
                if inspect.iscoroutine(result):
                    await result
            ran += 1
    assert ran == 4
