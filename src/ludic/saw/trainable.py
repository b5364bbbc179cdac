"""What can be trained on: the rule for the sampling settings stored in a rollout, and the checks of
a batch's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic.errors import BatchError, NotTrainableError
from ludic.saw.items import SAWItem

_TRUNCATION_OFF = (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
_PENALTIES_OFF = (
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
)

_RESHAPING = frozenset(
    {
        *(name for name, _ in (*_TRUNCATION_OFF, *_PENALTIES_OFF)),
        *("temperature", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens"),
        *("max_think_tokens", "thinking_token_budget", "structured_outputs", "response_format"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)
"""What a server may be asked for besides, and then samples from another distribution."""

_truncation_and_penalties = itemgetter(*(name for name, _ in (*_TRUNCATION_OFF, *_PENALTIES_OFF)))
_OFF = tuple(off for _, off in (*_TRUNCATION_OFF, *_PENALTIES_OFF))


def is_plain(sampling: Mapping[str, Any]) -> bool:
    """Whether settings that are all recorded leave the distribution as it is but for a temperature:
    no further check is needed."""
    try:
        plain = bool(sampling.get("temperature")) and _truncation_and_penalties(sampling) == _OFF
    except KeyError:
        return False
    return plain and "extensions" not in sampling


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
    extensions = sampling.get("extensions", {})
    overrides = extensions.get("extra_body_overrides", {})
    asked = {**extensions, **overrides, **overrides.get("sampling_params", {})}
    if reshaping := sorted(n for n in _RESHAPING & set(asked) if asked[n] != sampling.get(n)):
        raise NotTrainableError(
            f"{where} was sampled with {', '.join(reshaping)} among the extensions, which the "
            "trainer cannot reproduce: tokens that the server forces or forbids are not those of "
            "the policy; leave it out to train"
        )
    if kept_ids_recorded:
        return
    for name, off in _TRUNCATION_OFF:
        if sampling.get(name, off) != off:
            raise NotTrainableError(
                f"{where} was sampled with {name}={sampling[name]} and the kept ids were not "
                f"recorded: set ReturnSpec(kept_ids=True), or {name}={off}, to train"
            )


def describe(item: SAWItem, index: int) -> str:
    """How errors name a sample."""
    turns = [span.turn_index for span in item.turns]
    return f"sample {index} (rollout {item.rollout_id!r}, turns {turns})"


def visible_tokens(
    item: SAWItem, index: int, max_seq_len: int | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The item's tokens that the attention mask shows, and which of them are actions."""
    ids = np.asarray(item.input_ids, dtype=np.int64)
    actions = np.asarray(item.action_mask, dtype=bool)
    keep = np.asarray(item.attention_mask, dtype=bool)
    hidden = False
    if not keep.all():
        hidden = bool(actions[~keep].any())
        ids, actions = ids[keep], actions[keep]
    wrong = None
    if max_seq_len is not None and ids.size > max_seq_len:
        wrong = (
            f" has {ids.size} tokens, over max_seq_len={max_seq_len}: raise the "
            "setting, or drop such samples with the filter drop_overlong()"
        )
    elif hidden:
        wrong = ": an action token is hidden by the attention mask"
    elif actions[0]:
        wrong = ": its first token is an action, which nothing predicts"
    elif not item.temperature > 0:
        wrong = f": temperature {item.temperature} is not a distribution to train on"
    if wrong is not None:
        raise BatchError(describe(item, index) + wrong)
    return ids, actions


ROUNDING = 1e-2
"""How far above 0 a log-prob may come out that a server computed in bfloat16."""


def check_logprobs(items: Sequence[SAWItem]) -> None:
    """Log-probs are there for all samples of the batch or for none, and finite, however the batch
    is packed."""
    for name in ("behavior_logprobs", "reference_logprobs", "teacher_logprobs"):
        found = [getattr(item.attachments, name) for item in items]
        known = [values for values in found if values is not None]
        if not known or (len(known) == len(found) and _are_logprobs(np.concatenate(known))):
            continue
        for index, (item, values) in enumerate(zip(items, found, strict=True)):
            if values is None:
                raise BatchError(
                    f"{describe(item, index)} has no {name}, while others of its batch do: "
                    "record them for all samples, or for none"
                )
            if not np.isfinite(values).all():
                at = int(np.argmin(np.isfinite(values)))
                raise BatchError(
                    f"{describe(item, index)}: {name} of action token {at} is {values[at]}, which "
                    "cannot be trained on: look at what reported it, or drop the sample"
                )
            if not _are_logprobs(values):
                at = int(np.argmax(values))
                raise BatchError(
                    f"{describe(item, index)}: {name} of action token {at} is {values[at]}, above "
                    "0, so it is no log-probability: look at what reported it (a logit, or a "
                    "negated log-prob?), or drop the sample"
                )


def _are_logprobs(values: NDArray[np.floating[Any]]) -> bool:
    """Whether all are finite, and above 0 by no more than rounding."""
    return bool((np.isfinite(values) & (values <= ROUNDING)).all())
