"""The documentation is true: every Python block on every page runs, and so does every doctest."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from ludic.registry import AGENTS, ALGORITHMS, CONTEXTS, ENVS, LOGGERS, PROTOCOLS, TOOLS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])
SOURCES = sorted((ROOT / "src").glob("**/*.py"))
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page: what is on the fence's line, the code, and where it starts."""

    info: str
    code: str
    line: int

    @property
    def runs(self) -> bool:
        words = self.info.split()
        return words[:1] == ["python"] and "no-run" not in words

    @property
    def is_output(self) -> bool:
        """Whether it shows what the blocks before it print."""
        return self.info.split() == ["text", "output"]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks_of(text: str) -> list[Block]:
    """Every fenced block of a page, in order."""
    return [
        Block(
            match["info"].strip(),
            textwrap.dedent(match["code"]),
            text.count("\n", 0, match.start("code")),
        )
        for match in FENCE.finditer(text)
    ]


def code_of(block: Block, page: Path) -> CodeType:
    """A block as code that may `await`, with the page's own line numbers."""
    source = "\n" * block.line + block.code
    code: CodeType = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return code


async def run_page(page: Path, text: str, names: dict[str, Any]) -> None:
    """Runs the blocks of a page in one namespace, and compares what it says they print."""
    printed = io.StringIO()
    for block in blocks_of(text):
        if block.is_output:
            assert block.code.strip() == printed.getvalue().strip()
            printed = io.StringIO()
        elif block.runs:
            with contextlib.redirect_stdout(printed):
                result = eval(code_of(block, page), names)
                if inspect.iscoroutine(result):
                    await result


@pytest.fixture
def page_module(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A module for a page's names; what the page registered is forgotten afterwards."""
    module = ModuleType(f"docs_page_{abs(hash(request.node.name))}")
    sys.modules[module.__name__] = module
    registries = (ENVS, AGENTS, PROTOCOLS, TOOLS, ALGORITHMS, CONTEXTS, LOGGERS)
    before = [set(registry.names()) for registry in registries]
    yield module
    del sys.modules[module.__name__]
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry.names()) - names:
            registry.unregister(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
async def test_every_python_block_of_a_page_runs(
    page: Path, page_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await run_page(page, text_of(page), page_module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_of_the_repository_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page)):
        if not re.match(r"[a-z]+:", target) and not target.startswith("reference/"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


async def test_a_page_whose_code_fails_or_prints_something_else_is_noticed() -> None:
    page = Path("page.md")
    good = (
        "```python\nawait __import__('asyncio').sleep(0)\nprint(1)\n```\n```text output\n1\n```\n"
    )
    await run_page(page, good, {})
    with pytest.raises(AssertionError):
        await run_page(page, good.replace("output\n1", "output\n2"), {})
    with pytest.raises(ZeroDivisionError):
        await run_page(page, good.replace("print(1)", "1 / 0"), {})


def test_blocks_are_found_with_their_lines_and_their_marks() -> None:
    page = (
        "# T\n\n```python\nx = 1\n```\n\n1. step:\n\n"
        "   ```python no-run\n   y\n   ```\n```bash\nls\n```\n"
    )
    found = blocks_of(page)
    assert [(b.info, b.code, b.line, b.runs) for b in found] == [
        ("python", "x = 1\n", 3, True),
        ("python no-run", "y\n", 9, False),
        ("bash", "ls\n", 12, False),
    ]


@pytest.mark.parametrize(
    "source",
    [source for source in SOURCES if ">>> " in source.read_text(encoding="utf-8")],
    ids=lambda source: str(source.relative_to(ROOT)),
)
def test_every_doctest_holds(source: Path) -> None:
    name = ".".join(source.relative_to(ROOT / "src").with_suffix("").parts)
    outcome = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert outcome.attempted > 0
    assert outcome.failed == 0
