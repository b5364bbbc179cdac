"""A policy that follows a script, for tests, benchmarks and play.

It implements the whole contract of a backend: token ids in, token ids and log-probs out, limits,
stop strings, versions, deadlines. Only the words come from a script instead of a model.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ludic.errors import ConfigError, EngineClosedError, RequestRejectedError
from ludic.inference.client import TokenCompletionRequest, completion_room
from ludic.inference.retries import within
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.templates.token_codec import NOTHING
from ludic.types import ChatResponse, FinishReason, TokenTrace, VersionSpan

_REMEMBERED_CONVERSATIONS = 100_000


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """What a policy function is given: the request, how many calls its conversation had before
    (`index`), and the prompt's text, decoded when it is asked for."""

    request: TokenCompletionRequest
    index: int
    _decode: Callable[[Sequence[int]], str] = field(repr=False)

    @property
    def text(self) -> str:
        """The prompt as text, special tokens spelled out."""
        return self._decode(self.request.prompt_token_ids)

    def tail(self, tokens: int) -> str:
        """The text of the prompt's last tokens, which is cheaper than all of it."""
        return self._decode(self.request.prompt_token_ids[-tokens:])


ScriptedPolicy: TypeAlias = Callable[[ScriptedCall], str | Awaitable[str]]


class ScriptedChatClient:
    """Answers with a list of texts, or with what a policy function says.

    Every conversation (by its `conversation_id`) reads the list from its beginning; with
    `cycle=True` it starts over at the end; otherwise one call too many is rejected. `logprob` is
    the log-prob of every token: 0.0, since a script is certain, or a function of position and
    token id. `fault` may return an exception for a call, and it is raised. The seconds that the
    client itself spends on tokenising are added up in `tokenize_seconds`.
    """

    def __init__(
        self,
        script: Sequence[str] | ScriptedPolicy,
        chat_template: HFChatTemplate,
        *,
        cycle: bool = False,
        logprob: float | Callable[[int, int], float] = 0.0,
        version: int = 0,
        latency_s: float = 0.0,
        fault: Callable[[ScriptedCall], BaseException | None] | None = None,
        max_context_tokens: int | None = None,
    ) -> None:
        if isinstance(script, str):
            raise ConfigError("a script is a list of texts or a function, not one string")
        if not callable(script) and not script:
            raise ConfigError("an empty script: give at least one text")
        if latency_s < 0:
            raise ConfigError(f"latency_s={latency_s}: must be >= 0")
        self._script = script
        self._codec = chat_template.codec
        self._end_id = chat_template.end_token_id
        self._cycle = cycle
        self._logprob = logprob
        self._version = version
        self._latency_s = latency_s
        self._fault = fault
        self.max_context_tokens = max_context_tokens
        self._calls_of: OrderedDict[str | None, int] = OrderedDict()
        self._closed = False
        self.calls = 0
        self.tokenize_seconds = 0.0

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        """Answers one request, within its `timeout_s`."""
        if self._closed:
            raise EngineClosedError("this scripted client is closed")
        completion_room(request.prompt_token_ids, self.max_context_tokens, "max_context_tokens")
        call = ScriptedCall(request, self._count(request.conversation_id), self._decode)
        async with within(request.timeout_s, "a completion", "the script"):
            if self._latency_s:
                await asyncio.sleep(self._latency_s)
            if self._fault is not None and (error := self._fault(call)) is not None:
                raise error
            text = self._next_text(call)
            if inspect.isawaitable(text):
                text = await text
        if not isinstance(text, str):
            raise RequestRejectedError(
                f"the policy function returned {type(text).__name__}; it must return a string"
            )
        return self._response(request, text)

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        """Takes the version; a script has no weights."""
        if version < self._version:
            raise RequestRejectedError(
                f"version {version} is older than the current {self._version}: versions only grow"
            )
        self._version = version
        return "noted the version; a script has no weights"

    async def get_policy_version(self) -> int:
        return self._version

    async def close(self) -> None:
        """Refuses further requests."""
        self._closed = True

    def _count(self, conversation_id: str | None) -> int:
        """How many calls the conversation had before this one. Very old conversations are
        forgotten, so that a long run does not grow."""
        self.calls += 1
        index = self._calls_of.pop(conversation_id, 0)
        self._calls_of[conversation_id] = index + 1
        if len(self._calls_of) > _REMEMBERED_CONVERSATIONS:
            self._calls_of.popitem(last=False)
        return index

    def _next_text(self, call: ScriptedCall) -> str | Awaitable[str]:
        if callable(self._script):
            return self._script(call)
        if call.index >= len(self._script) and not self._cycle:
            raise RequestRejectedError(
                f"the script has {len(self._script)} texts, and conversation "
                f"{call.request.conversation_id!r} asked for one more: pass cycle=True, or a "
                "function"
            )
        return self._script[call.index % len(self._script)]

    def _response(self, request: TokenCompletionRequest, text: str) -> ChatResponse:
        started = time.perf_counter()
        ids = [*self._codec.encode(self._codec.guard(text, NOTHING)), self._end_id]
        ids, reason = self._limited(ids, request)
        spelled = self._codec.decode(ids[:-1] if ids[-1] == self._end_id else ids)
        self.tokenize_seconds += time.perf_counter() - started
        logprobs: tuple[float, ...] | None = None
        if request.returns.logprobs:
            logprob = self._logprob
            logprobs = (
                tuple(logprob(i, token) for i, token in enumerate(ids))
                if callable(logprob)
                else (logprob,) * len(ids)
            )
        trace = TokenTrace(
            request.prompt_token_ids,
            tuple(ids),
            logprobs,
            (VersionSpan(0, len(ids), self._version),),
            ((),) * len(ids) if request.returns.kept_ids else None,
        )
        return ChatResponse(trace, reason, spelled)

    def _limited(
        self, ids: list[int], request: TokenCompletionRequest
    ) -> tuple[list[int], FinishReason]:
        """Cuts at the first stop id, stop string or limit; what stops stays in."""
        sampling = request.sampling
        stops = frozenset((*sampling.stop_token_ids, self._end_id))
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))

        def has_stopped(tokens: int) -> bool:
            return any(text in self._codec.decode(ids[:tokens]) for text in sampling.stop)

        if has_stopped(end):
            # The shortest prefix that spells a stop string: once it is spelled, it stays spelled.
            end = bisect_left(range(end), True, key=has_stopped)
        limit = len(ids) if sampling.max_tokens is None else sampling.max_tokens
        if self.max_context_tokens is not None:
            limit = min(limit, self.max_context_tokens - len(request.prompt_token_ids))
        if end > limit:
            return ids[:limit], FinishReason.LENGTH
        return ids[:end], FinishReason.STOP

    def _decode(self, ids: Sequence[int]) -> str:
        started = time.perf_counter()
        text = self._codec.decode(ids)
        self.tokenize_seconds += time.perf_counter() - started
        return text
