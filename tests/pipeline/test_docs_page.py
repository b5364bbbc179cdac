"""The page about runs over Redis names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_guarantee_on_the_page_names_tests_that_exist(repo_root: Path) -> None:
    page = (repo_root / "docs" / "pipeline.md").read_text(encoding="utf-8")
    table = page.partition("## Guarantees")[2].partition("## Figures")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert rows
    assert all(re.search(r"`test_\w+`", row) for row in rows), "a guarantee without a test"
    there = "\n".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")
    )
    missing = [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in there]
    assert not missing
