"""The tokens of a model call, and which policy sampled them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from ludic.errors import DataError
from ludic.plumbing.frozen import quick


def all_finite(values: Iterable[float]) -> bool:
    """Whether all of them are numbers, and none is NaN, infinite or beyond what a float holds."""
    try:
        return all(map(isfinite, values))
    except (TypeError, OverflowError):
        return False


@quick
@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The policy version that sampled the completion's tokens `start` to `end` (exclusive).

    `attempt` counts the trainers of a run over Redis, whose versions may have the same number: the
    pair names one policy. Everywhere else it is 0.
    """

    start: int
    end: int
    version: int
    attempt: int = 0


@quick
@dataclass(frozen=True, slots=True)
class TokenTrace:
    """The exact tokens of one model call: what went in, what was sampled, how likely it was.

    `completion_logprobs` are those of the distribution that was sampled from (after temperature
    and truncation), in float32. `kept_token_ids`, when recorded, lists for every completion token
    the ids that truncated sampling had kept; an empty tuple stands for the whole vocabulary.
    `version_spans` cover the completion, token by token, or are empty where nothing is known.
    """

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    completion_logprobs: tuple[float, ...] | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    kept_token_ids: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        # A list would never equal a tuple, so a prompt that extends another would look forked.
        for name, value in (
            ("prompt_token_ids", self.prompt_token_ids),
            ("completion_token_ids", self.completion_token_ids),
            ("completion_logprobs", self.completion_logprobs),
        ):
            if type(value) is tuple:
                continue
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            elif value is not None and not isinstance(value, tuple):
                raise DataError(
                    f"TokenTrace.{name} is a {type(value).__name__}: give a tuple of plain numbers"
                )
        for name, ids in (
            ("prompt_token_ids", self.prompt_token_ids),
            ("completion_token_ids", self.completion_token_ids),
        ):
            kinds = {*map(type, ids)}
            if (kinds <= {int} or all(issubclass(kind, int) for kind in kinds)) and (
                not ids or min(ids) >= 0
            ):
                continue
            wrong = next(i for i in ids if not isinstance(i, int) or i < 0)
            raise DataError(f"TokenTrace.{name} has {wrong!r}: an id is an int from 0 on")
        logprobs = self.completion_logprobs or ()
        if not all_finite(logprobs):
            bad = next(value for value in logprobs if not all_finite((value,)))
            raise DataError(
                f"TokenTrace.completion_logprobs has {bad!r}: a log-prob is a finite number"
            )
        n = len(self.completion_token_ids)
        for name, values in (
            ("completion_logprobs", self.completion_logprobs),
            ("kept_token_ids", self.kept_token_ids),
        ):
            if values is not None and len(values) != n:
                raise DataError(f"TokenTrace.{name} has {len(values)} entries for {n} tokens")
        covered, in_order = 0, True
        for span in self.version_spans:
            in_order = in_order and span.start == covered <= span.end
            covered = span.end
        if self.version_spans and not (in_order and covered == n):
            found = ", ".join(f"{s.start}-{s.end}" for s in self.version_spans)
            raise DataError(
                f"TokenTrace: the version spans {found} do not cover the {n} completion tokens, "
                "each once and in order"
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and completion, end to end."""
        return self.prompt_token_ids + self.completion_token_ids

    def extends(self, previous: TokenTrace) -> bool:
        """Whether this prompt begins with all the tokens of `previous`, sampled ones included."""
        n, m = len(previous.prompt_token_ids), len(previous.completion_token_ids)
        prompt = self.prompt_token_ids
        return (
            prompt[:n] == previous.prompt_token_ids
            and prompt[n : n + m] == previous.completion_token_ids
        )
