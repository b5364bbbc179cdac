"""The figure of the data's way names files that exist, and is what its tool draws."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tools.data_flow import FIGURE, figure

SVG = "{http://www.w3.org/2000/svg}"


def test_every_file_that_the_figure_names_exists(repo_root: Path) -> None:
    root = ElementTree.fromstring(FIGURE.read_text(encoding="utf-8"))
    files = [text.text or "" for text in root.iter(f"{SVG}text") if text.get("class") == "file"]
    assert len(files) == 14
    assert [name for name in files if not (repo_root / "src" / "ludic" / name).exists()] == []


def test_every_file_of_the_figure_defines_what_its_box_is_called(repo_root: Path) -> None:
    root = ElementTree.fromstring(FIGURE.read_text(encoding="utf-8"))
    texts = [text for text in root.iter(f"{SVG}text") if text.get("class") in ("title", "file")]
    named = [(title.text, file.text) for title, file in zip(texts[::2], texts[1::2], strict=True)]
    for title, file in named:
        path = repo_root / "src" / "ludic" / str(file)
        if path.is_file():
            assert f"class {title}" in path.read_text(encoding="utf-8"), (title, file)


def test_the_figure_is_up_to_date_and_dresses_for_a_dark_page() -> None:
    drawn = FIGURE.read_text(encoding="utf-8")
    assert drawn == figure(), "draw it again: python -m tools.data_flow"
    assert "prefers-color-scheme: dark" in drawn
