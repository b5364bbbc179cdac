"""The page on the in-process engine says what the engine does with a family."""

from __future__ import annotations

import pytest

from tools.engine_families import TABLE, tried
from tools.families import families

QUICK = ("llama", "gemma3_text", "cohere2", "phi3", "gpt2", "mixtral", "gemma2", "doge", "phimoe")


@pytest.mark.parametrize("name", QUICK)
def test_a_family_is_served_as_the_page_says(name: str) -> None:
    assert tried(name).how == TABLE.written()[name]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_family_is_served_as_the_page_says() -> None:
    found = {name: tried(name).how for name in families()}
    assert "wrong" not in found.values()
    assert TABLE.written() == found


def test_the_page_lists_every_family_of_the_installed_transformers() -> None:
    assert TABLE.written().keys() == set(families())
