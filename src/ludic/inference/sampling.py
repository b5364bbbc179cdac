"""How to sample, what to return, and which samples may be trained on."""

from __future__ import annotations

import math
from numbers import Integral

from msgspec import field
from msgspec.structs import force_setattr, replace

from ludic.errors import ConfigError
from ludic.plumbing.records import Record, changed
from ludic.types import Info


def _is_int(value: object) -> bool:
    """Python's integers and numpy's; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    """Whether it is a string that a completion could spell: not empty, no lone surrogates."""
    if not isinstance(value, str):
        return False
    return bool(value) and not any("\ud800" <= c <= "\udfff" for c in value)


class SamplingConfig(Record, frozen=True):
    """The sampled distribution, and where a completion stops.

    The defaults are those that may be trained on: plain sampling at temperature 1. `top_k=0` and
    `min_p=0` mean off. `max_tokens=None` means as many as the context holds. Stop strings stay
    part of the completion, since the tokens that spell them were sampled.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        rules = (
            (0 <= self.temperature < math.inf, "temperature", "finite and >= 0"),
            (0 < self.top_p <= 1, "top_p", "in (0, 1]"),
            (_is_int(self.top_k) and self.top_k >= 0, "top_k", "an int >= 0 (0 is off)"),
            (0 <= self.min_p <= 1, "min_p", "in [0, 1]"),
            (math.isfinite(self.presence_penalty), "presence_penalty", "finite (0 is off)"),
            (math.isfinite(self.frequency_penalty), "frequency_penalty", "finite (0 is off)"),
            (0 < self.repetition_penalty < math.inf, "repetition_penalty", "> 0 (1 is off)"),
            (
                self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
                "max_tokens",
                "an int >= 1, or None",
            ),
            (
                not isinstance(self.stop, str) and all(map(_is_text, self.stop)),
                "stop",
                "a tuple of non-empty strings that UTF-8 can encode",
            ),
            (all(i >= 0 for i in self.stop_token_ids), "stop_token_ids", "ids >= 0"),
        )
        for ok, name, must in rules:
            if not ok:
                raise ConfigError(f"SamplingConfig.{name}={getattr(self, name)!r}: must be {must}")

    def for_call(self, seed: int | None, max_tokens: int | None) -> SamplingConfig:
        """The same settings for one call. What is not given anew was checked already."""
        if max_tokens is not self.max_tokens:
            return replace(self, seed=seed, max_tokens=max_tokens)
        return changed(self, seed=seed)

    @property
    def truncates(self) -> bool:
        """Whether ids are cut from the distribution, so that it must be renormalised."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Whether the distribution depends on the tokens before in a way a trainer cannot redo."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class ReturnSpec(Record, frozen=True):
    """What to return besides the tokens. `prompt_logprobs` scores the prompt (for teachers);
    without `text` a backend that would have to decode it for you does not."""

    logprobs: bool = True
    kept_ids: bool = False
    prompt_logprobs: bool = False
    text: bool = True


class InferenceSpec(Record, frozen=True):
    """Everything about a model call that does not depend on the prompt. Pure data.

    `extensions` is for settings of one backend only: `VLLMExtensions`, or a plain mapping.
    """

    sampling: SamplingConfig = SamplingConfig()
    returns: ReturnSpec = ReturnSpec()
    extensions: Info = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.extensions) is not dict:  # only plain data can be stored with a rollout
            force_setattr(self, "extensions", dict(self.extensions))
