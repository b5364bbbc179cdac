"""One model call: from messages to tokens, and back to the assistant's message.

A `ModelCaller` is given the call before, and extends its tokens wherever the messages only grew and
the template allows it; where not, the new call's `fork` says why. Agents are one kind of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any

from msgspec.structs import asdict, replace

from ludic.errors import AgentError, InferenceError
from ludic.inference.client import ChatClient, TokenCompletionRequest, ToolRequest
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.templates.chat_template import ChatTemplate, ParsedCompletion
from ludic.plumbing.records import Record
from ludic.plumbing.text import clean_json, clean_text
from ludic.seeding import derive_seed
from ludic.types import AgentStep, ChatResponse, FinishReason, Fork, ForkReason, Message
from ludic.workers.deadlines import bounded
from ludic.workers.threads import shared_threads

LONG_TEXT = 100_000
"""From this many characters on, messages are tokenised in a thread: a few megabytes take
seconds, in which the event loop would serve no other episode."""


class ModelCall(Record, frozen=True):
    """One model call before its tools have run: what `AgentStep` is made of. `messages` and `tools`
    are all that the model was shown, `new_messages` those of them that were new."""

    messages: tuple[Message, ...]
    tools: ToolRequest | None
    new_messages: tuple[Message, ...]
    parsed: ParsedCompletion
    response: ChatResponse
    fork: Fork | None
    sampling: Mapping[str, Any]

    def as_step(
        self,
        turn: int,
        tool_messages: tuple[Message, ...] = (),
        tool_call_errors: tuple[str, ...] = (),
    ) -> AgentStep:
        """The call as a step of a rollout, with what its tools answered. Messages are copied: a
        context may change its own later on, but not what the model was shown."""
        return AgentStep(
            turn,
            tuple([message.copy() for message in self.new_messages]),
            self.parsed.message.copy(),
            self.response.finish_reason,
            self.response.trace,
            self.fork,
            tool_messages,
            tool_call_errors or self.parsed.tool_call_errors,
            self.sampling,
            clean_json(self.response.info),
        )


class ModelCaller:
    """Asks one client for completions, each with its own seed.

    The n-th call since `begin_calls` samples with `derive_seed(seed, "call", n)`.
    """

    client: ChatClient
    model: str
    chat_template: ChatTemplate
    inference: InferenceSpec
    request_timeout_s: float | None

    def begin_calls(self, seed: int | None, conversation_id: str | None) -> None:
        """Counts calls from here on. `conversation_id` lets a backend keep them together."""
        if self.chat_template is None:
            raise AgentError(
                f"{type(self).__name__} needs a chat template to turn messages into tokens: pass "
                "chat_template=HFChatTemplate(tokenizer)"
            )
        self._seed = seed
        self.conversation_id = conversation_id
        self._calls = 0
        self._is_punctual: bool = getattr(self.client, "keeps_deadlines", False)

    def template_for(self, tools: ToolRequest | None) -> ChatTemplate:
        """The template that renders and reads a call with these tools."""
        return self.chat_template

    @property
    def context_limit(self) -> int | None:
        """The longest prompt plus completion; None where that is unknown."""
        return self.client.max_context_tokens

    def prompt(
        self, messages: tuple[Message, ...], tools: ToolRequest | None, previous: ModelCall | None
    ) -> tuple[tuple[int, ...], tuple[Message, ...], Fork | None]:
        """The prompt's ids, the messages that are new in it, and why it forks, if it does."""
        template, schemas = self.template_for(tools), None if tools is None else tools.tools
        if previous is None:
            return tuple(template.render(messages, schemas)), messages, None
        shown = (*previous.messages, previous.parsed.message)
        grew = messages[: len(shown)] == shown
        new_messages = messages[len(shown) :] if grew else unseen(messages, shown)
        trace = previous.response.trace
        if trace is None:  # a backend without ids: nothing to extend, and nothing to fork from
            return tuple(template.render(messages, schemas)), new_messages, None
        extension: list[int] | Fork
        if not grew:
            extension = Fork(ForkReason.HISTORY_REWRITTEN, "the context shows another history")
        elif tools is not previous.tools and tools != previous.tools:
            extension = Fork(ForkReason.TOOLS_CHANGED, "the model is shown other tools")
        else:
            extension = template.extend(messages, trace, schemas)
        if isinstance(extension, Fork):
            return tuple(template.render(messages, schemas)), new_messages, extension
        prompt = (*trace.prompt_token_ids, *trace.completion_token_ids, *extension)
        return prompt, new_messages, None

    async def complete(
        self,
        messages: tuple[Message, ...],
        tools: ToolRequest | None = None,
        previous: ModelCall | None = None,
        sampling: SamplingConfig | None = None,
    ) -> ModelCall | None:
        """Samples one assistant message; None when its prompt leaves no room in the context.
        `sampling` stands in for the settings that all calls have. Calls may overlap: each is
        counted before the first wait."""
        number = self._calls
        self._calls += 1
        if sum([len(message["content"]) for message in messages]) >= LONG_TEXT:
            prompt, new_messages, fork = await shared_threads().run(
                lambda: self.prompt(messages, tools, previous),
                what="the tokens of a long text",
                whom="the chat template",
                timeout_s=self.request_timeout_s,
            )
        else:
            prompt, new_messages, fork = self.prompt(messages, tools, previous)
        sampling = sampling or self.inference.sampling
        seed, limit = sampling.seed, sampling.max_tokens
        if self._seed is not None:
            seed = derive_seed(self._seed, "call", number)
        if (most := self.context_limit) is not None:
            room = most - len(prompt)
            if room < 1:
                return None
            if limit is not None or most != self.client.max_context_tokens:
                limit = room if limit is None else min(limit, room)  # else the client sees to it
        request = TokenCompletionRequest(
            self.model,
            prompt,
            sampling.for_call(seed, limit),
            self.inference.returns,
            self.conversation_id,
            self.request_timeout_s,
            self.inference.extensions,
        )
        answer = self.client.complete_tokens(request)
        if not self._is_punctual:
            whom = f"model {self.model!r}"
            answer = bounded(answer, "a completion", whom, self.request_timeout_s)
        response = await answer
        self._check(prompt, response)
        parsed = _cleaned(self.template_for(tools).parse(response))
        settings = {**_as_json(sampling), "seed": seed, "max_tokens": limit}
        if extensions := self.inference.extensions:
            settings["extensions"] = json.loads(json.dumps(extensions, default=str))
        return ModelCall(messages, tools, new_messages, parsed, response, fork, settings)

    def _check(self, prompt: tuple[int, ...], response: ChatResponse) -> None:
        trace = response.trace
        if trace and trace.prompt_token_ids is not prompt and trace.prompt_token_ids != prompt:
            raise InferenceError(
                f"model {self.model!r} answered a different prompt from the one it was sent "
                f"({len(trace.prompt_token_ids)} tokens, sent {len(prompt)})"
            )
        if response.finish_reason is FinishReason.ABORT:
            raise InferenceError(f"the backend of model {self.model!r} aborted the request")


class TurnTaker(ModelCaller):
    """Takes turns, each made of model calls."""

    def begin_calls(self, seed: int | None, conversation_id: str | None) -> None:
        super().begin_calls(seed, conversation_id)
        self._turn = -1
        self.previous_call: ModelCall | None = None
        self._steps: list[AgentStep] = []

    @property
    def tool_request(self) -> ToolRequest | None:
        """The tools that the model is shown in every call."""
        return None

    @property
    def steps_of_turn(self) -> tuple[AgentStep, ...]:
        """The finished model calls of the turn under way, or of the last one: what there is to
        record when `act` fails half-way."""
        return tuple(self._steps)

    def begin_turn(self) -> None:
        """For `act`: a new turn, without steps yet."""
        self._turn += 1
        self._steps.clear()

    def record(
        self,
        call: ModelCall,
        tool_messages: tuple[Message, ...] = (),
        tool_call_errors: tuple[str, ...] = (),
    ) -> None:
        """Adds the call to the turn's steps."""
        self._steps.append(call.as_step(self._turn, tool_messages, tool_call_errors))


def _cleaned(parsed: ParsedCompletion) -> ParsedCompletion:
    """The message in text that can be stored: a server's JSON, or that of a tool call, may spell
    halves of surrogate pairs."""
    message, calls, errors = parsed.message, parsed.tool_calls, parsed.tool_call_errors
    if not calls and not errors and message["content"].isascii():
        return parsed
    return replace(
        parsed,
        message=clean_json(message),
        tool_calls=tuple([clean_json(call) for call in calls]),
        tool_call_errors=tuple(map(clean_text, errors)),
    )


@lru_cache(maxsize=64)
def _as_json(sampling: SamplingConfig) -> Mapping[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(sampling).items()}


def unseen(messages: tuple[Message, ...], shown: tuple[Message, ...]) -> tuple[Message, ...]:
    """The end of a rewritten history that is new in it: what follows the last assistant message,
    and whatever else was shown before. Messages are told apart as objects, not by their text,
    since an observation may come twice."""
    seen = {id(message) for message in shown}
    new = takewhile(lambda m: m["role"] != "assistant" and id(m) not in seen, reversed(messages))
    return tuple(new)[::-1]
