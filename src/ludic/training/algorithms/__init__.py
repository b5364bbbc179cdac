"""The presets: one algorithm, one file. The registry lists them, which imports neither them nor
torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ludic.registry import ALGORITHMS
from ludic.registry import list_algorithms as list_algorithms
from ludic.registry import register_algorithm as register_algorithm

if TYPE_CHECKING:
    from ludic.training.algorithm import RLAlgorithm


def make_algorithm(name: str, **kwargs: Any) -> RLAlgorithm:
    """The preset `name` with these arguments; an unknown name's error lists the nearest ones.

    An `aggregation` may be named, too: "token_mean", {"kind": "constant", "length": 64}.
    """
    if "aggregation" in kwargs:
        from ludic.training.losses.aggregation import make_aggregation

        kwargs["aggregation"] = make_aggregation(kwargs["aggregation"])
    return ALGORITHMS.make_from({"kind": name, **kwargs})  # type: ignore[no-any-return]
