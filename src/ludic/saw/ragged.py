"""Arithmetic on many short arrays that lie end to end in one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def ranges(starts: ArrayLike, lengths: ArrayLike) -> NDArray[np.int64]:
    """The numbers of all the ranges, each with its start and length, end to end.

    >>> ranges([0, 10], [3, 2]).tolist()
    [0, 1, 2, 10, 11]
    """
    sizes = np.asarray(lengths, np.int64)
    shifts = np.asarray(starts, np.int64) - sizes.cumsum() + sizes
    numbers: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(shifts, sizes)
    return numbers


def bounds(lengths: Sequence[int]) -> list[int]:
    """Where arrays of these lengths begin and, one further on, end.

    >>> bounds([3, 2])
    [0, 3, 5]
    """
    return [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
