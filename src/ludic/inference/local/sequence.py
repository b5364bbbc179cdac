"""One request inside the engine: its tokens, how far they are computed, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from ludic.inference.local.arena import Tenant
from ludic.inference.local.prefix_store import PACKED
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.plumbing.records import changed
from ludic.types import ChatResponse, FinishReason, TokenTrace, VersionSpan

Deliver = Callable[[ChatResponse | BaseException], None]
_NONE = np.empty(0, PACKED)


class Sequence(Tenant, eq=False, kw_only=True):
    """`tokens` is prompt and completion; the first `computed` of them are in the slot.

    Sampling appends a token, so a running sequence always has one token that is not computed yet.
    Only the engine's thread touches a sequence, except for `cancelled`: any thread may set it, and
    it never goes back, so the engine may look at it without a lock and at worst a step late.
    """

    prompt_token_ids: tuple[int, ...]
    prompt_key: bytes
    """The prompt's `key_of_ids`."""
    limit: int
    sampling: SamplingConfig
    returns: ReturnSpec
    key: int
    stop_ids: frozenset[int]
    deliver: Deliver
    seed: int = 0
    reused: int = 0
    beginning: object = None
    """Sequences with the same one have the same keys and values, to the bit, for as many of their
    first tokens as both have in `common`."""
    common: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    kept: list[tuple[int, ...]] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_len: int = 0
    prompt: NDArray[np.uint32] = _NONE
    """The tokens that it came with, as an array, for finding a common beginning quickly."""
    is_special: bool = False
    """Whether its distribution needs more than a temperature."""
    is_plain: bool = False
    """Whether a draw from the scaled logits is all that it needs."""
    started: bool = False
    cancelled: bool = False
    finished: FinishReason | None = None
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.prompt_token_ids, list):  # whoever asked may go on with it
            self.prompt_token_ids = tuple(self.prompt_token_ids)
        self.tokens, self.prompt_len = list(self.prompt_token_ids), len(self.prompt_token_ids)
        self.prompt = np.frombuffer(self.prompt_key, PACKED)
        # Asked for every token, and the same for all of them.
        self.is_special = self.sampling.truncates or self.sampling.penalises
        self.is_plain = self.sampling.temperature > 0 and not self.is_special

    @property
    def completion(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def known_tokens(self) -> NDArray[np.int64]:
        """The tokens whose keys and values are in the slot and may be kept. The last one of a
        sequence that ended is not: nothing was computed from it."""
        count = min(self.computed, len(self.tokens) - 1)
        return np.asarray(self.tokens[:count], dtype=np.int64)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probs of the prompt are still to be found."""
        return self.returns.prompt_logprobs and len(self.prompt_logprobs) < self.prompt_len

    @property
    def description(self) -> str:
        """The request in an error message's words."""
        return (
            f"the request with seed {self.seed} (prompt of {self.prompt_len} tokens, "
            f"{self.generated} sampled)"
        )

    def accept(self, token: int, logprob: float, version: int, kept: tuple[int, ...]) -> None:
        """Takes a sampled token, and notes which policy version sampled it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.returns.kept_ids:
            self.kept.append(kept)
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((self.generated - 1, version))

    def check_end(self, decode: Callable[[list[int]], str]) -> FinishReason | None:
        """Why the sequence ends with its last token, or None."""
        if self.tokens[-1] in self.stop_ids or (
            self.sampling.stop and self._stop_string_in_tail(decode)
        ):
            self.finished = FinishReason.STOP
        elif self.generated >= self.limit:
            self.finished = FinishReason.LENGTH
        return self.finished

    def _stop_string_in_tail(self, decode: Callable[[list[int]], str]) -> bool:
        # A token is at least one byte, so a stop string spans no more tokens than it has bytes; a
        # few more keep a character that is split over tokens whole.
        reach = max(len(s.encode()) for s in self.sampling.stop) + 4
        tail = decode(self.tokens[max(self.prompt_len, len(self.tokens) - reach) :])
        return any(s in tail for s in self.sampling.stop)

    def response(self, text: str | None, info: dict[str, Any]) -> ChatResponse:
        """The finished sequence as what the client returns."""
        ends = [start for start, _ in self.versions[1:]] + [self.generated]
        spans = tuple(
            [
                VersionSpan(start, end, v)
                for (start, v), end in zip(self.versions, ends, strict=True)
            ]
        )
        trace = TokenTrace(
            (),
            completion_token_ids=tuple(self.completion),
            completion_logprobs=tuple(self.logprobs) if self.returns.logprobs else None,
            version_spans=spans,
            kept_token_ids=tuple(self.kept) if self.returns.kept_ids else None,
        )
        # The prompt was checked when the request came.
        trace = changed(trace, prompt_token_ids=self.prompt_token_ids)
        if self.returns.prompt_logprobs:
            info["prompt_logprobs"] = list(self.prompt_logprobs)
        assert self.finished is not None
        return ChatResponse(trace, self.finished, text, info)
