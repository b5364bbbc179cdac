"""Lines of code are those that do something."""

from __future__ import annotations

import re
from pathlib import Path

from tools.count import code_lines, table

SOURCE = '''"""A docstring
of two lines."""

# a comment
TEXT = """not a docstring,
so it counts"""


def f() -> int:
    """Said."""
    return (
        1  # and here
    )
'''


def test_docstrings_comments_and_blanks_are_no_code() -> None:
    assert code_lines(SOURCE) == 6


def test_the_table_has_every_room_and_the_sum(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "room" / "b.py").write_text("X = 1\n" * 40)
    rows = [line.split() for line in table(tmp_path, 1).splitlines()[1:]]
    assert rows == [[".", "6", "1", "1"], ["room", "40", "1", "0"], ["all", "46", "2", "1"]]


def test_the_spine_of_an_update_is_listed_with_the_lines_that_its_files_have(
    repo_root: Path,
) -> None:
    page = (repo_root / "docs/architecture.md").read_text()
    listed = {name: int(n) for name, n in re.findall(r"\| \d+ \| `([^`]+)` \| (\d+) \|", page)}
    assert listed
    source = repo_root / "src/ludic"
    assert listed == {name: code_lines((source / name).read_text()) for name in listed}
    assert f"{len(listed)} files and {sum(listed.values()):,} lines of code" in page
