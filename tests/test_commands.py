"""The modules that texts and messages tell a user to run do something when they are run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

COMMAND = re.compile(r"python -m (ludic(?:\.[a-z_]+)*|(?:tools|benchmarks)\.[a-z][a-z0-9_]*)")


def places(repo_root: Path) -> dict[str, str]:
    """Returns every module that is told to be run, with a file that says so."""
    files = [*repo_root.glob("*.md"), repo_root / "Makefile"]
    for folder in ("docs", "examples", "src", "benchmarks", "tools"):
        files += (p for p in (repo_root / folder).rglob("*") if p.suffix in (".md", ".py"))
    return {
        module: str(path.relative_to(repo_root))
        for path in files
        for module in COMMAND.findall(path.read_text(encoding="utf-8"))
    }


def runs(module: str, repo_root: Path) -> bool:
    """Whether `python -m module` reaches code of the form `if __name__ == "__main__"`."""
    root = repo_root / "src" if module.startswith("ludic") else repo_root
    path = root.joinpath(*module.split("."))
    if (path / "__main__.py").is_file():
        return True
    if not path.with_suffix(".py").is_file():
        return False
    tree = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))
    tests = [ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If)]
    return "__name__ == '__main__'" in tests


def test_every_module_that_is_told_to_be_run_can_be(repo_root: Path) -> None:
    told = places(repo_root)
    assert {"ludic.inference.vllm_server", "tools.count"} <= told.keys()
    assert {m: said for m, said in told.items() if not runs(m, repo_root)} == {}


def test_a_module_without_a_main_is_noticed(repo_root: Path) -> None:
    assert not runs("ludic.inference.vllm.server", repo_root)
    assert not runs("ludic.no_such_module", repo_root)
