"""Counts the code: lines without docstrings, comments and blanks, and modules, by room.

`python -m tools.count [FOLDER]` prints a table of `src/ludic` or of the folder.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "src" / "ludic"
SMALL = 40
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """Returns the number of lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def table(folder: Path, depth: int) -> str:
    """Returns lines, modules and small modules of every room, and their sums."""
    lines, modules, small = Counter[str](), Counter[str](), Counter[str]()
    for path in sorted(folder.rglob("*.py")):
        room = "/".join(path.relative_to(folder).parent.parts[:depth]) or "."
        count = code_lines(path.read_text(encoding="utf-8"))
        lines[room] += count
        modules[room] += 1
        small[room] += count < SMALL and path.name != "__init__.py"
    rows = [(room, lines[room], modules[room], small[room]) for room in sorted(lines)]
    rows.append(("all", lines.total(), modules.total(), small.total()))
    heading = f"{'room':32}{'lines':>8}{'modules':>9}{f'under {SMALL}':>10}"
    return "\n".join([heading, *(f"{r:32}{a:8,}{b:9}{c:10}" for r, a, b, c in rows)])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=SOURCES)
    parser.add_argument("--depth", type=int, default=1, help="folders that make a room's name")
    args = parser.parse_args()
    print(table(args.folder, args.depth))


if __name__ == "__main__":
    main()
