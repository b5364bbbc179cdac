"""The two thin matrices that an adapter adds to a projection's."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Adapter(NamedTuple):
    """A low-rank addition to a matrix: `scale * up @ down`. The shapes are [rank, inner] for `down`
    and [width, rank] for `up`."""

    down: Tensor
    up: Tensor
    scale: float
