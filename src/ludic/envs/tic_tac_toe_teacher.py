"""A teacher that shows how to answer, and not how to win: legal moves at random, with a word."""

from __future__ import annotations

from random import Random

from ludic.envs.tic_tac_toe_rules import CELLS

_CORNERS = ("A1", "C1", "A3", "C3")


def random_legal(obs: str, rng: Random) -> str:
    """A free cell of the board in `obs`, named in tags after what kind of cell it is."""
    free = [cell for cell in obs.rpartition("Free:")[2].split() if cell in CELLS]
    cell = rng.choice(free)
    kind = "The centre" if cell == "B2" else "A corner" if cell in _CORNERS else "An edge"
    return f"{kind}: <move>{cell}</move>"
