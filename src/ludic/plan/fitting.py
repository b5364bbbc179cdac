"""Constants from measurements: the non-negative ones whose relative errors are the smallest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Measured = tuple[Mapping[str, float], float]
"""What a time depends on, by the names of figures, and the seconds."""
_ROUNDS = 20_000


def fit(rows: Sequence[Measured], given: Mapping[str, float] | None = None) -> dict[str, float]:
    """The constants of `rows`, beside those that are `given`. By coordinate descent, so that a
    constant which the rows do not tell stays 0."""
    given = given or {}
    names = sorted({name for features, _ in rows for name in features} - set(given))
    sizes = np.array(
        [[features.get(n, 0.0) / seconds for n in names] for features, seconds in rows]
    )
    known = [sum(given.get(n, 0.0) * f for n, f in features.items()) for features, _ in rows]
    goal = np.array([1 - part / seconds for part, (_, seconds) in zip(known, rows, strict=True)])
    scale = np.sqrt((sizes**2).sum(axis=0))
    scale[scale == 0] = 1.0
    columns = sizes / scale
    found = np.zeros(len(names))
    rest = goal.copy()
    for _ in range(_ROUNDS):
        moved = 0.0
        for index in range(len(names)):
            column = columns[:, index]
            better = max(found[index] + float(column @ rest), 0.0)
            rest -= (better - found[index]) * column
            moved = max(moved, abs(better - found[index]))
            found[index] = better
        if moved < 1e-10:
            break
    return {name: float(value) for name, value in zip(names, found / scale, strict=True)}
