"""Which sampling settings can be trained on: the rule for the settings stored in a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from ludic.errors import NotTrainableError

_TRUNCATION_OFF = (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
_PENALTIES_OFF = (
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
)

_truncation_and_penalties = itemgetter(*(name for name, _ in (*_TRUNCATION_OFF, *_PENALTIES_OFF)))
_OFF = tuple(off for _, off in (*_TRUNCATION_OFF, *_PENALTIES_OFF))


def is_plain(sampling: Mapping[str, Any]) -> bool:
    """Whether settings that are all recorded leave the distribution as it is but for a temperature:
    no further check is needed."""
    try:
        return bool(sampling.get("temperature")) and _truncation_and_penalties(sampling) == _OFF
    except KeyError:
        return False


def check_sampling(sampling: Mapping[str, Any], *, kept_ids_recorded: bool, where: str) -> None:
    """Raises `NotTrainableError` if a trainer could not reproduce the sampled distribution.

    Settings that are not recorded count as their trainable defaults.
    """
    if is_plain(sampling):
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
