"""The documentation has an order with every page in it, and code that fits its column."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import ludic
from ludic.runs.settings import parse_run
from tools.griffe_doctests import fenced
from tools.mkdocs_hooks import on_config, on_page_markdown, parts

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```", re.M | re.S)
COLUMN = 88


def nav() -> list[dict[str, list[str]]]:
    """The sections of the documentation."""
    sections: list[dict[str, list[str]]] = yaml.safe_load(
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    )["nav"]
    return sections


def blocks(*infos: str) -> Iterator[tuple[str, str]]:
    """Each fenced block of these kinds, with its page's name."""
    for page in [ROOT / "README.md", *PAGES]:
        for match in FENCE.finditer(page.read_text(encoding="utf-8")):
            if match["info"] in infos:
                yield page.name, match["code"]


def test_every_page_has_one_place_in_the_order() -> None:
    listed = [page for section in nav() for pages in section.values() for page in pages]
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in PAGES]


def test_the_order_is_start_tutorial_concepts_recipes_results_reference() -> None:
    names = [name for section in nav() for name in section]
    assert names == ["Start", "Tutorial", "Concepts", "Recipes", "Results", "Reference"]


def test_the_api_reference_comes_last_with_every_part_of_the_package() -> None:
    config = on_config({"nav": nav()})
    (pages,) = config["nav"][-1]["Reference"][-1].values()
    assert [page for entry in pages for page in entry.values()] == [
        f"reference/{part}.md" for part in parts()
    ]
    assert "training" in parts()


def test_the_site_has_no_marks_for_tests_and_no_links_out_of_its_folder() -> None:
    page = "[rules](../CONSIDERATIONS.md), [agent](agent.md)\n```python no-run\n```\n"
    assert on_page_markdown(page) == "rules, [agent](agent.md)\n```python\n```\n"


def test_a_doctest_is_code_on_a_reference_page() -> None:
    text = "Adds.\n\n>>> 1 + 1\n2\n\nThen:\n\n>>> def f():\n...\n...     return 3"
    assert fenced(text) == (
        "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nThen:\n\n"
        "```pycon\n>>> def f():\n...\n...     return 3\n```"
    )
    assert fenced("No prompt.") == "No prompt."


def test_python_on_a_page_fits_its_column() -> None:
    long = [
        f"{page}: {line}"
        for page, code in blocks("python", "python no-run")
        for line in code.splitlines()
        if len(line) > COLUMN
    ]
    assert long == [], "make format breaks them"


def test_every_run_file_on_a_page_can_be_read() -> None:
    runs = [(page, code) for page, code in blocks("toml") if "env" in tomllib.loads(code)]
    assert len(runs) >= 6
    for page, code in runs:
        assert parse_run(code).env, page


def test_the_first_lines_of_the_readme_are_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They train a model from the hub; here they assemble the run with the embedded one."""
    started: list[Any] = []

    class Finished:
        report = "before and after"

    def train(env: Any, **settings: Any) -> Finished:
        started.append(ludic.Run(env, **{**settings, "model": "tiny"}))
        return Finished()

    class Guess(ludic.SingleAgentEnv):
        def env_reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            return "A or B?", {}

        def env_step(self, action: str) -> ludic.StepOutcome:
            return ludic.StepOutcome("", 0.0, terminated=True)

        def env_current_obs(self) -> str:
            return "A or B?"

    module = ModuleType("guess")
    module.__dict__["Guess"] = Guess
    monkeypatch.setitem(sys.modules, "guess", module)
    monkeypatch.setattr(ludic, "train", train)
    monkeypatch.chdir(tmp_path)
    code = next(code for page, code in blocks("python no-run") if page == "README.md")
    exec(compile(code, "README.md", "exec"), {})
    (run,) = started
    assert run.config.training.steps == 200
    assert run.algorithm.name == "grpo"
    assert run.config.protocol.kwargs["parser"] == {"kind": "xml", "tag": "move"}
