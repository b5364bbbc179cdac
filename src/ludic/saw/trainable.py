"""Which sampling settings can be trained on: one rule for the settings stored in a rollout and for
`SamplingConfig.check_trainable`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.errors import NotTrainableError

_TRUNCATION_OFF = (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
_PENALTIES_OFF = (
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
)

_ALL_OFF = dict((*_TRUNCATION_OFF, *_PENALTIES_OFF)).items()


def check_sampling(sampling: Mapping[str, Any], *, kept_ids_recorded: bool, where: str) -> None:
    """Raises `NotTrainableError` if a trainer could not reproduce the sampled distribution.

    Settings that are not recorded count as their trainable defaults.
    """
    if sampling.get("temperature") and sampling.items() >= _ALL_OFF:
        return
    if sampling.get("temperature") == 0:
        raise NotTrainableError(
            f"{where} was sampled at temperature 0, which is not a distribution: "
            "sample at a temperature above 0 to train"
        )
    for name, off in _PENALTIES_OFF:
        if sampling.get(name, off) != off:
            raise NotTrainableError(
                f"{where} was sampled with {name}={sampling[name]}, which the trainer cannot "
                f"reproduce: set it to {off} to train"
            )
    if kept_ids_recorded:
        return
    for name, off in _TRUNCATION_OFF:
        if sampling.get(name, off) != off:
            raise NotTrainableError(
                f"{where} was sampled with {name}={sampling[name]} and the kept ids were not "
                f"recorded: set ReturnSpec(kept_ids=True), or {name}={off}, to train"
            )
