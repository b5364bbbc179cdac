"""Seeds as a plan: stable, disjoint, and in 63 bits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ludic.errors import ConfigError
from ludic.seeding import derive_seed

PARTS = st.lists(st.integers() | st.text(), max_size=4).map(tuple)


@given(root=st.integers(), path=PARTS)
def test_a_seed_has_63_bits_and_is_the_same_every_time(root: int, path: tuple[Any, ...]) -> None:
    seed = derive_seed(root, *path)
    assert 0 <= seed < 2**63
    assert seed == derive_seed(root, *path)


@given(one=PARTS, other=PARTS, root=st.integers())
def test_different_paths_have_different_seeds(
    one: tuple[Any, ...], other: tuple[Any, ...], root: int
) -> None:
    assume(one != other)
    assert derive_seed(root, *one) != derive_seed(root, *other)


def test_the_parts_of_a_path_do_not_run_together() -> None:
    places = [(12,), (1, 2), ("12",), ("1", "2"), ("1", 2), (1, "2"), ("", "12"), ("12", "")]
    assert len({derive_seed(0, *place) for place in places}) == len(places)


def test_a_large_plan_has_no_seed_twice() -> None:
    plan = {derive_seed(7, "episode", e, "call", c) for e in range(300) for c in range(100)}
    assert len(plan) == 30_000


def test_the_derivation_never_changes() -> None:
    # Stored runs are replayed with these; another value would break every one of them.
    assert derive_seed(0) == 9112507877425210602
    assert derive_seed(0, "episode", 3) == 6629273182366075726
    assert derive_seed(2**70, "é", -1) == 216369211042523169


@pytest.mark.parametrize("bad", [1.5, 1.0, None, True, ("a",), ["a"]])
def test_a_path_of_anything_but_integers_and_text_is_refused(bad: Any) -> None:
    derive_seed(1, 1)  # which equals some of them
    with pytest.raises(ConfigError, match="seed"):
        derive_seed(0, bad)
    with pytest.raises(ConfigError, match="seed"):
        derive_seed(bad)
