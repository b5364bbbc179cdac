"""The LLM harness: from the context to tokens, one model call, and back to an action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from ludic.context.base import ContextStrategy
from ludic.errors import AgentError, DeadlineError, InferenceError
from ludic.frozen import quick
from ludic.inference.client import ChatClient, TokenCompletionRequest
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.templates.chat_template import ChatTemplate, ParsedCompletion
from ludic.parsers import Parser, ParseResult
from ludic.seeding import derive_seed
from ludic.types import (
    AgentStep,
    ChatResponse,
    FinishReason,
    Fork,
    ForkReason,
    Info,
    Message,
    Obs,
    TruncationReason,
)
from ludic.workers.deadlines import deadline

_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingConfig))
CUT_FEEDBACK = "Your reply was cut off at its length limit. Answer again, and more briefly."


@quick
@dataclass(frozen=True, slots=True)
class ActResult:
    """One turn of an agent: every model call of it, and what its last one was read as.

    `parse.action` is None when the turn gave no action. `truncation` is set when the turn could
    not be finished, because the next prompt no longer fits the model's context.
    """

    steps: tuple[AgentStep, ...]
    parse: ParseResult
    truncation: TruncationReason | None = None


@quick
@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call before its tools have run: what `AgentStep` is made of."""

    new_messages: tuple[Message, ...]
    parsed: ParsedCompletion
    response: ChatResponse
    fork: Fork | None
    sampling: Mapping[str, Any]


class Agent:
    """A model with a memory and a parser: one model call per turn.

    A protocol calls `reset` and `on_env_reset` at an episode's beginning, then `act` and
    `on_after_step` in turn. Prompts extend the previous call's tokens wherever the context only
    grew and the template allows it; where not, the step's `fork` says why.

    The n-th model call since `reset` samples with `derive_seed(seed, "call", n)`. `system_prompt`
    is used where `reset` is given none.

    A subclass with another kind of turn overrides `act` and builds it from `begin_turn`,
    `call_model`, `record` and `conclude`.
    """

    def __init__(
        self,
        client: ChatClient,
        model: str,
        ctx: ContextStrategy,
        parser: Parser,
        chat_template: ChatTemplate,
        *,
        inference: InferenceSpec | None = None,
        system_prompt: str | None = None,
        request_timeout_s: float | None = 300.0,
    ) -> None:
        if chat_template is None:
            raise AgentError(
                f"{type(self).__name__} needs a chat template to turn messages into tokens: pass "
                "chat_template=HFChatTemplate(tokenizer)"
            )
        self.client = client
        self.model = model
        self.ctx = ctx
        self.parser = parser
        self.chat_template = chat_template
        self.inference = inference or InferenceSpec()
        self.system_prompt = system_prompt
        self.request_timeout_s = request_timeout_s
        self._sampling_json = _as_json(self.inference.sampling)
        self._steps: list[AgentStep] = []
        self._begin(None, None)

    @property
    def steps_of_turn(self) -> tuple[AgentStep, ...]:
        """The finished model calls of the turn under way, or of the last one: what there is to
        record when `act` fails half-way."""
        return tuple(self._steps)

    def reset(
        self,
        system_prompt: str | None = None,
        *,
        seed: int | None = None,
        conversation_id: str | None = None,
    ) -> None:
        """Forgets the last episode. `conversation_id` lets a backend keep the calls together."""
        self._begin(seed, conversation_id)
        self.ctx.reset(self.system_prompt if system_prompt is None else system_prompt)

    def on_env_reset(self, obs: Obs, info: Info) -> None:
        """The episode begins with `obs`."""
        self.ctx.on_env_reset(obs, info)

    def on_after_step(self, obs: Obs, info: Info) -> None:
        """The environment, or the parser as feedback, answers with `obs`."""
        self.ctx.on_after_step(obs, info)

    async def act(self) -> ActResult:
        """Takes one turn."""
        self.begin_turn()
        call = await self.call_model()
        if call is None:
            return self.out_of_context()
        self.record(call)
        return self.conclude(call)

    async def close(self) -> None:
        """Frees what the episode opened; the agent can begin another. Protocols call it at an
        episode's end, also after a failure."""

    def _begin(self, seed: int | None, conversation_id: str | None) -> None:
        self._seed = seed
        self._conversation_id = conversation_id
        self._calls = 0
        self._turn = -1
        self._shown: tuple[Message, ...] = ()
        self._previous: ModelCall | None = None
        self._previous_tools: Sequence[Mapping[str, Any]] | None = None
        self._steps.clear()

    def begin_turn(self) -> None:
        """For `act`: a new turn, without steps yet."""
        self._turn += 1
        self._steps.clear()

    async def call_model(
        self, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ModelCall | None:
        """Samples one assistant message; None when its prompt leaves no room in the context."""
        messages = tuple(self.ctx.on_before_act())
        prompt, new_messages, fork = self._prompt(messages, tools)
        limit = self.client.max_context_tokens
        room = None if limit is None else limit - len(prompt)
        if room is not None and room < 1:
            return None
        sampling, sampling_json = self._sampling(room)
        response = await self._complete(prompt, sampling)
        parsed = self.chat_template.parse(response)
        call = ModelCall(new_messages, parsed, response, fork, sampling_json)
        self.ctx.on_after_act(parsed.message)
        self._calls += 1
        self._shown, self._previous, self._previous_tools = messages, call, tools
        return call

    def _prompt(
        self, messages: tuple[Message, ...], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[tuple[int, ...], tuple[Message, ...], Fork | None]:
        """The prompt's ids, the messages that are new in it, and why it forks, if it does."""
        previous = self._previous
        if previous is None:
            return tuple(self.chat_template.render(messages, tools)), messages, None
        n = len(self._shown)
        grew = (
            len(messages) > n
            and messages[n] == previous.parsed.message
            and messages[:n] == self._shown
        )
        new_messages = messages[n + 1 :] if grew else _unseen(messages, self._shown)
        trace = previous.response.trace
        if trace is None:  # a backend without ids: nothing to extend, and nothing to fork from
            return tuple(self.chat_template.render(messages, tools)), new_messages, None
        extension: list[int] | Fork
        if not grew:
            extension = Fork(ForkReason.HISTORY_REWRITTEN, "the context shows another history")
        elif tools is not self._previous_tools and tools != self._previous_tools:
            extension = Fork(ForkReason.TOOLS_CHANGED, "the model is shown other tools")
        else:
            extension = self.chat_template.extend(messages, trace, tools)
        if isinstance(extension, Fork):
            return tuple(self.chat_template.render(messages, tools)), new_messages, extension
        return (
            (*trace.prompt_token_ids, *trace.completion_token_ids, *extension),
            new_messages,
            None,
        )

    def _sampling(self, room: int | None) -> tuple[SamplingConfig, Mapping[str, Any]]:
        """This call's sampling settings, and the same as JSON."""
        sampling, as_json = self.inference.sampling, self._sampling_json
        seed, limit = sampling.seed, sampling.max_tokens
        if self._seed is not None:
            seed = derive_seed(self._seed, "call", self._calls)
        if room is not None and limit is not None and limit > room:
            limit = room
        if seed is sampling.seed and limit is sampling.max_tokens:
            return sampling, as_json
        changed = sampling.for_call(seed, limit)
        return changed, {**as_json, "seed": seed, "max_tokens": limit}

    async def _complete(self, prompt: tuple[int, ...], sampling: SamplingConfig) -> ChatResponse:
        request = TokenCompletionRequest(
            self.model,
            prompt,
            sampling,
            self.inference.returns,
            self._conversation_id,
            self.request_timeout_s,
            self.inference.extensions,
        )
        try:
            # The client has the deadline too; this one holds when the client does not keep it.
            with deadline(self.request_timeout_s) as limit:
                response = await self.client.complete_tokens(request)
        except TimeoutError as exc:
            if isinstance(exc, DeadlineError) or not limit.expired:
                raise
            raise DeadlineError(
                "a completion", f"model {self.model!r}", self.request_timeout_s or 0.0
            ) from exc
        trace = response.trace
        if trace and trace.prompt_token_ids is not prompt and trace.prompt_token_ids != prompt:
            raise InferenceError(
                f"model {self.model!r} answered a different prompt from the one it was sent "
                f"({len(trace.prompt_token_ids)} tokens, sent {len(prompt)})"
            )
        if response.finish_reason is FinishReason.ABORT:
            raise InferenceError(f"the backend of model {self.model!r} aborted the request")
        return response

    def record(
        self,
        call: ModelCall,
        tool_messages: tuple[Message, ...] = (),
        tool_call_errors: tuple[str, ...] = (),
    ) -> None:
        """Adds the call to the turn's steps."""
        self._steps.append(
            AgentStep(
                self._turn,
                call.new_messages,
                call.parsed.message,
                call.response.finish_reason,
                call.response.trace,
                call.fork,
                tool_messages,
                tool_call_errors or call.parsed.tool_call_errors,
                call.sampling,
                call.response.info,
            )
        )

    def conclude(self, call: ModelCall) -> ActResult:
        """Reads the turn's last message. A completion cut by length gives no action, even if its
        text would parse: it gets what the parser gives to no answer at all, and never a bonus."""
        parse = self.parser(call.parsed.message["content"])
        if call.response.finish_reason is FinishReason.LENGTH:
            no_answer = self.no_answer(CUT_FEEDBACK)
            parse = replace(no_answer, reward=min(parse.reward, no_answer.reward))
        return ActResult(tuple(self._steps), parse)

    def no_answer(self, feedback: str | None = None) -> ParseResult:
        """The result of a turn that ended without an answer. It gets the parser's penalty: were
        it free to run on, or to call tools to the end, a policy would learn to, wherever its
        other prospects are bad."""
        return ParseResult(None, min(self.parser("").reward, 0.0), feedback)

    def out_of_context(self) -> ActResult:
        """For `act`: the turn's result when there was no room for the next call. Calls that used
        up the room without an answer are punished; a prompt that never fitted is nobody's doing."""
        parse = self.no_answer() if self._steps else ParseResult(None)
        return ActResult(tuple(self._steps), parse, TruncationReason.CONTEXT_WINDOW)


@lru_cache(maxsize=64)
def _as_json(sampling: SamplingConfig) -> Mapping[str, Any]:
    values = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _unseen(messages: tuple[Message, ...], shown: tuple[Message, ...]) -> tuple[Message, ...]:
    """The end of a rewritten history that is new in it: what follows the last assistant message,
    and whatever else was shown before. Messages are told apart as objects, not by their text,
    since an observation may come twice."""
    seen = {id(message) for message in shown}
    start = len(messages)
    while (
        start and messages[start - 1]["role"] != "assistant" and id(messages[start - 1]) not in seen
    ):
        start -= 1
    return messages[start:]
