"""The presets: one algorithm, one file. Listing them imports neither them nor torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ludic.errors import ConfigError, DuplicateNameError, UnknownNameError

if TYPE_CHECKING:
    from ludic.training.algorithm import RLAlgorithm

Factory = Callable[..., "RLAlgorithm"]


_descriptions: dict[str, str] = {
    "reinforce": "the policy gradient with Monte Carlo returns",
    "reinforce_baseline": "REINFORCE minus the batch's mean return",
    "grpo": "group-relative advantages, PPO's clip per token",
    "dr_grpo": "GRPO without division by std or length",
    "gspo": "one clipped ratio per sequence",
    "cispo": "capped importance weights, no token loses its gradient",
    "sapo": "a soft gate in the place of the clip",
    "gmpo": "the geometric mean of clipped ratios",
    "scalerl": "CISPO, hybrid-normalised credit, groups weighing the same",
    "spo": "no groups: a tracked value per task as the baseline",
    "opd": "distillation from a teacher on the student's own samples",
    "sft": "weighted log-likelihood of recorded actions",
}
_registered: dict[str, Factory] = {}
"""Algorithms of others; a built-in one is found by its name when it is made."""


def list_algorithms() -> dict[str, str]:
    """Every known algorithm, with one line on it."""
    return dict(_descriptions)


def register_algorithm(name: str, factory: Factory, *, description: str = "") -> None:
    """Makes `factory` available under `name`, to `make_algorithm` and the command line."""
    if name in _descriptions:
        raise DuplicateNameError(f"an algorithm named {name!r} is registered already")
    _descriptions[name], _registered[name] = description, factory


def make_algorithm(name: str, **kwargs: Any) -> RLAlgorithm:
    """The preset `name` with these arguments; an unknown name's error lists the nearest ones.

    An `aggregation` may be named, too: "token_mean", {"kind": "constant", "length": 64}.
    """
    if name not in _descriptions:
        raise UnknownNameError("algorithm", name, _descriptions)
    factory = _registered.get(name)
    if factory is None:
        factory = getattr(import_module(f"ludic.training.algorithms.{name}"), f"make_{name}")
    if "aggregation" in kwargs:
        from ludic.training.losses.aggregation import make_aggregation

        kwargs["aggregation"] = make_aggregation(kwargs["aggregation"])
    try:
        return factory(**kwargs)
    except TypeError as exc:
        raise ConfigError(f"algorithm {name!r} with {kwargs}: {exc}") from exc
