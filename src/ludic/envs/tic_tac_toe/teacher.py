"""A teacher that shows how to answer, and not how to win: legal moves at random, with a word."""

from __future__ import annotations

from random import Random

from ludic.envs.tic_tac_toe.rules import CELLS

_CORNERS = ("A1", "C1", "A3", "C3")


def random_legal(obs: str, rng: Random) -> str:
    """A sentence that names a free cell of the board in `obs`, and what kind of cell it is."""
    free = [cell for cell in obs.rpartition("Free:")[2].split() if cell in CELLS]
    cell = rng.choice(free)
    kind = "centre" if cell == "B2" else "corner" if cell in _CORNERS else "edge"
    return f"I take the {kind} {cell}."
