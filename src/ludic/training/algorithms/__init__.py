"""The presets: one algorithm, one file. Listing them imports neither them nor torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ludic.errors import ConfigError, DuplicateNameError, UnknownNameError

if TYPE_CHECKING:
    from ludic.training.algorithm import RLAlgorithm

Factory = Callable[..., "RLAlgorithm"]


@dataclass(frozen=True, slots=True)
class Preset:
    """A named algorithm: how to make it (a factory, or where to find one), and one line on it."""

    factory: Factory | str
    description: str


def _builtin(name: str, description: str) -> tuple[str, Preset]:
    return name, Preset(f"ludic.training.algorithms.{name}:make_{name}", description)


_presets: dict[str, Preset] = dict(
    [
        _builtin("reinforce", "the policy gradient with Monte Carlo returns"),
        _builtin("reinforce_baseline", "REINFORCE minus the batch's mean return"),
        _builtin("grpo", "group-relative advantages, PPO's clip per token"),
        _builtin("dr_grpo", "GRPO without division by std or length"),
        _builtin("gspo", "one clipped ratio per sequence"),
        _builtin("cispo", "capped importance weights, no token loses its gradient"),
        _builtin("sapo", "a soft gate in the place of the clip"),
        _builtin("gmpo", "the geometric mean of clipped ratios"),
        _builtin("scalerl", "CISPO, hybrid-normalised credit, groups weighing the same"),
        _builtin("spo", "no groups: a tracked value per task as the baseline"),
        _builtin("opd", "distillation from a teacher on the student's own samples"),
        _builtin("sft", "weighted log-likelihood of recorded actions"),
    ]
)


def list_algorithms() -> dict[str, str]:
    """Every known algorithm, with one line on it."""
    return {name: preset.description for name, preset in _presets.items()}


def register_algorithm(name: str, factory: Factory, *, description: str = "") -> None:
    """Makes `factory` available under `name`, to `make_algorithm` and the command line."""
    if name in _presets:
        raise DuplicateNameError(f"an algorithm named {name!r} is registered already")
    _presets[name] = Preset(factory, description)


def make_algorithm(name: str, **kwargs: Any) -> RLAlgorithm:
    """The preset `name` with these arguments; an unknown name's error lists the nearest ones.

    An `aggregation` may be named, too: "token_mean", {"kind": "constant", "length": 64}.
    """
    preset = _presets.get(name)
    if preset is None:
        raise UnknownNameError("algorithm", name, _presets)
    factory = preset.factory
    if isinstance(factory, str):
        module, attribute = factory.split(":")
        factory = getattr(import_module(module), attribute)
    if "aggregation" in kwargs:
        from ludic.training.losses.aggregation import make_aggregation

        kwargs["aggregation"] = make_aggregation(kwargs["aggregation"])
    try:
        return factory(**kwargs)
    except TypeError as exc:
        raise ConfigError(f"algorithm {name!r} with {kwargs}: {exc}") from exc
