"""What one program asked for, and the exact tokens of every answer.

A request whose messages continue an answered one, any of them, extends its tokens. What a program
says the assistant said counts as unchanged if it is what the program was given; the model is then
shown what it wrote, token by token. Everything else is rendered from scratch, and is a fork.

Only the event loop that answers the requests touches a session.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from ludic import errors
from ludic.agents.model_calls import ModelCall, ModelCaller
from ludic.agents.programs.chat_api import Answer, ApiError, ChatRequest, answer_of
from ludic.inference.client import ChatClient, ToolRequest
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.templates.chat_template import ChatTemplate, ChoosesToolParser
from ludic.types import AgentStep, Fork, ForkReason, Message, TruncationReason
from ludic.workers.deadlines import ended


@dataclass(frozen=True, slots=True)
class Repetition:
    """How a request may be known as one that was sent before: the digest of its body, the key that
    a client may have given it, and whether the client says that it tries again."""

    digest: bytes = b""
    idempotency_key: str | None = None
    is_retry: bool = False


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that is sampled for, or was. `waiting` counts who is connected for its answer;
    `delivered` says that somebody got it."""

    request: ChatRequest
    repetition: Repetition
    id: str
    created: int
    task: asyncio.Task[ModelCall] = field(init=False)
    answer: Answer | None = None
    continues: _Asked | None = None
    waiting: int = 0
    delivered: bool = False
    recorded: bool = False

    @property
    def call(self) -> ModelCall:
        return self.task.result()

    def is_continued_by(self, messages: tuple[Message, ...]) -> bool:
        """Whether they begin with this request's, and what it was answered."""
        asked = self.request.messages
        n = len(asked)
        return (
            self.answer is not None
            and len(messages) > n
            and messages[n] == self.answer.message
            and messages[:n] == asked
        )


@dataclass(eq=False, repr=False)
class Session(ModelCaller):
    """One program's model calls. Whoever has the `key` may ask.

    The sampling settings of `inference` go before those of a request, which can only lower
    `max_tokens` and add `stop` strings. After `max_calls` calls requests are refused.
    """

    client: ChatClient
    model: str
    chat_template: ChatTemplate
    _: KW_ONLY
    inference: InferenceSpec = field(default_factory=InferenceSpec)
    request_timeout_s: float | None = 300.0
    max_calls: int | None = None
    seed: int | None = None
    conversation_id: str | None = None

    def __post_init__(self) -> None:
        self.begin_calls(self.seed, self.conversation_id)
        self.key = secrets.token_urlsafe(32)
        self.cut: TruncationReason | None = None
        """Why the last request got no answer, if it was a limit: the context's or `max_calls`."""
        self.failures: list[str] = []
        """What was wrong whenever the backend failed."""
        self._asked: list[_Asked] = []
        self._started = 0

    def template_for(self, tools: ToolRequest | None) -> ChatTemplate:
        """With tools, the template that reads calls of them."""
        template = self.chat_template
        if tools and isinstance(template, ChoosesToolParser):
            return template.for_tools()
        return template

    @property
    def undelivered(self) -> int:
        """How many answers nobody got, because the connection was cut. They are not recorded."""
        return sum(not asked.delivered for asked in self._asked)

    @asynccontextmanager
    async def answering(
        self, request: ChatRequest, repetition: Repetition
    ) -> AsyncIterator[Answer]:
        """Returns the answer, to be delivered within it: if that raises, nobody got the answer.

        A client's own retry of a request is given the answer that the request got, or waits for it
        too; the same request otherwise is another sample. Sampling goes on when a connection is
        cut, since the client may come back. Raises `ApiError`.
        """
        asked = self._repeated(repetition) or self._ask(request, repetition)
        asked.waiting += 1
        try:
            try:
                # Shielded: others may be waiting for it, or will.
                await asyncio.shield(asked.task)
            except asyncio.CancelledError:
                if asked.task.cancelled():
                    raise ApiError(503, "this session is over") from None
                raise
            except ApiError:
                raise
            except Exception as exc:
                raise _as_api_error(exc) from exc
            assert asked.answer is not None
            yield asked.answer
            asked.delivered = True
        finally:
            asked.waiting -= 1

    def take_steps(self, turn: int = 0) -> tuple[AgentStep, ...]:
        """The answered requests since the last time, in the order in which they came, as steps."""
        previous = next((asked for asked in reversed(self._asked) if asked.recorded), None)
        steps = []
        for asked in self._asked:
            if asked.recorded or not asked.delivered:
                continue
            asked.recorded = True
            steps.append(self._step(asked, previous, turn))
            previous = asked
        return tuple(steps)

    def conversation(self) -> tuple[Message, ...]:
        """The messages of the last recorded request, and its answer."""
        last = next((asked for asked in reversed(self._asked) if asked.recorded), None)
        return () if last is None else (*last.call.messages, last.call.parsed.message)

    async def end(self) -> None:
        """Breaks off what is still being sampled; its requests have no answer. Revokes the key: a
        server that opens the session again has another."""
        self.key = secrets.token_urlsafe(32)
        await ended(*[asked.task for asked in self._asked if not asked.task.done()])
        self._asked = [asked for asked in self._asked if asked.answer is not None]

    def _repeated(self, repetition: Repetition) -> _Asked | None:
        """The earlier request that this one repeats. Of several, one that nobody waits for and that
        was not delivered: its client is the likeliest to come again."""
        key = repetition.idempotency_key
        keyed = [a for a in self._asked if key and a.repetition.idempotency_key == key]
        if keyed:
            if keyed[0].repetition.digest != repetition.digest:
                message = "this idempotency key was sent with another request"
                raise ApiError(422, message, code="idempotency_key_reused")
            return keyed[0]
        if not repetition.is_retry:
            return None
        same = [a for a in self._asked if a.repetition.digest == repetition.digest]
        missed = [a for a in same if not a.delivered]
        alone = [a for a in missed if not a.waiting]
        return next(iter(alone or missed or same[-1:]), None)

    def _ask(self, request: ChatRequest, repetition: Repetition) -> _Asked:
        if self.max_calls is not None and self._started >= self.max_calls:
            self.cut = TruncationReason.BUDGET
            message = f"this session is over after {self.max_calls} requests"
            raise ApiError(400, message, code="max_calls")
        self._started += 1
        asked = _Asked(request, repetition, f"chatcmpl-{secrets.token_hex(12)}", int(time.time()))
        asked.continues = self._continued(request)
        asked.task = asyncio.create_task(self._sample(asked))
        # Its error is for those who wait. If nobody does, this keeps asyncio from complaining.
        asked.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._asked.append(asked)
        return asked

    def _continued(self, request: ChatRequest) -> _Asked | None:
        """The answered request that this one continues: the longest, and of those the last."""
        fitting = [a for a in self._asked if a.is_continued_by(request.messages)]
        head = max(reversed(fitting), key=lambda a: len(a.request.messages), default=None)
        if head is not None:  # what is continued has arrived, whatever the connection says
            head.delivered = True
        return head

    async def _sample(self, asked: _Asked) -> ModelCall:
        request, head = asked.request, asked.continues
        messages = request.messages
        before = None if head is None else head.call
        if before is not None:
            shown = (*before.messages, before.parsed.message)
            messages = (*shown, *messages[len(shown) :])
        try:
            call = await self.complete(messages, request.tools, before, self._settings(request))
            if call is None:
                self.cut = TruncationReason.CONTEXT_WINDOW
                message = (
                    f"the messages fill the context of {self.client.max_context_tokens} tokens"
                )
                raise ApiError(400, message, param="messages", code="context_length_exceeded")
        except BaseException as exc:
            self._asked.remove(asked)  # a retry samples again
            if not isinstance(exc, ApiError | asyncio.CancelledError):
                self.failures.append(f"{type(exc).__name__}: {exc}")
            raise
        self.cut = None
        asked.answer = answer_of(
            call, request.stop, id=asked.id, created=asked.created, model=self.model
        )
        return call

    def _settings(self, request: ChatRequest) -> SamplingConfig:
        sampling = self.inference.sampling
        limits = [n for n in (sampling.max_tokens, request.max_tokens) if n is not None]
        stop = (*sampling.stop, *(text for text in request.stop if text not in sampling.stop))
        limit = min(limits, default=None)
        if limit == sampling.max_tokens and stop == sampling.stop:
            return sampling
        return replace(sampling, max_tokens=limit, stop=stop)

    def _step(self, asked: _Asked, previous: _Asked | None, turn: int) -> AgentStep:
        step = asked.call.as_step(turn, self._tool_messages(asked))
        changes: dict[str, Any] = {}
        if step.fork is None and previous is not None and asked.continues is not previous:
            changes["fork"] = Fork(ForkReason.HISTORY_REWRITTEN, self._where(asked))
        run, overruled = self.inference.sampling, asked.request.overruled
        ignored = {n: v for n, v in overruled.items() if n == "seed" or v != getattr(run, n)}
        if ignored:
            changes["info"] = {**step.info, "overruled": ignored}
        return replace(step, **changes) if changes else step

    def _tool_messages(self, asked: _Asked) -> tuple[Message, ...]:
        """What tools answered to the calls of this answer: what the next request begins with."""
        following = next((a for a in self._asked if a.continues is asked and a.delivered), None)
        if following is None:
            return ()
        new = following.request.messages[len(asked.request.messages) + 1 :]
        return tuple(takewhile(lambda message: message["role"] == "tool", new))

    def _where(self, asked: _Asked) -> str:
        if asked.continues is None:
            return "the messages continue no earlier answer"
        recorded = [a for a in self._asked if a.recorded]
        return f"the messages go on from answer {recorded.index(asked.continues) + 1}"


def _as_api_error(exc: Exception) -> ApiError:
    text = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, errors.TemplateError | errors.ConfigError | errors.RequestRejectedError):
        return ApiError(400, str(exc))
    if isinstance(exc, errors.QueueFullError):
        return ApiError(429, text, code="rate_limit_exceeded")
    if isinstance(exc, errors.DeadlineError):
        return ApiError(504, text, code="timeout")
    if isinstance(exc, errors.EngineClosedError):
        return ApiError(503, text)
    return ApiError(502 if isinstance(exc, errors.LudicError) else 500, text)
