"""The documentation's tables of arguments are those of the signatures."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludic.registry import ALGORITHMS
from tools.signatures import (
    BEGIN,
    END,
    OF_ALGORITHMS,
    OF_THE_TINY_MODEL,
    PAGES,
    built_in,
    default,
    page_with,
    parameters,
)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_table_of_the_signatures(name: str, repo_root: Path) -> None:
    text = (repo_root / "docs" / name).read_text(encoding="utf-8")
    assert BEGIN in text
    assert END in text
    assert page_with(text, PAGES[name]()) == text, "write it: python -m tools.signatures --write"


def test_what_a_user_registered_is_not_on_the_page() -> None:
    before = PAGES["algorithm_arguments.md"]()
    ALGORITHMS.register("of_a_user", lambda window=3: None)
    try:
        assert PAGES["algorithm_arguments.md"]() == before
    finally:
        ALGORITHMS.unregister("of_a_user")


def test_every_meaning_belongs_to_an_argument() -> None:
    taken = {p.name for name in built_in() for p in parameters(ALGORITHMS.get(name))}
    assert taken == OF_ALGORITHMS.keys()
    assert all(f"`{name}`" in PAGES["embedded_model.md"]() for name in OF_THE_TINY_MODEL)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (True, "`true`"),
        (8, "`8`"),
        (float("inf"), "none"),
        ((0.8, 1.2), "`[0.8, 1.2]`"),
        ("turn", '`"turn"`'),
    ],
)
def test_a_default_is_shown_as_a_run_file_writes_it(value: object, shown: str) -> None:
    assert default(value) == shown
