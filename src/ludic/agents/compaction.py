"""Compaction: how an agent's dialogue is summarised by its own model before a turn.

The summary is sampled like any other message, from the dialogue itself, so its tokens can be
trained on. The prompt after it is a new beginning that has the summary's ids as they were sampled,
and those of the turns that stay: a fork with the reason `compacted`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ludic.agents.model_calls import ModelCall, TurnTaker, unseen
from ludic.context.compacting import AGAIN, CompactingDialog
from ludic.context.truncated_thinking import without_thinking
from ludic.errors import ConfigError
from ludic.inference.templates.chat_template import ParsedCompletion
from ludic.types import ChatResponse, FinishReason, Fork, ForkReason, Info, Message, TokenTrace

_ADDED = 256
_SOME_TEXT = "The red door is locked; the key was in room 3. "


class Compactor:
    """Compacts the dialogue of one agent."""

    def __init__(self, agent: TurnTaker, ctx: CompactingDialog) -> None:
        self._agent, self.dialog = agent, ctx
        self.begin()

    def begin(self) -> None:
        """A new episode."""
        self.info: dict[str, Any] | None = None
        """Of a compaction under way: what there is to record when it is broken off."""
        self._sampled: dict[int, tuple[Message, tuple[int, ...]]] = {}
        self._seam: tuple[Fork, tuple[Message, ...]] | None = None
        self._checked = False

    async def compact(self) -> Info | None:
        """Compacts the dialogue if it is time; returns the `info` of the turn that this was, whose
        model calls are the agent's `steps_of_turn`."""
        record: Info | None = None
        # A client that repeats what was recorded knows where a dialogue was compacted: the lengths
        # of prompts, which decide it otherwise, may be unknown there.
        if recorded := getattr(self._agent.client, "compaction", None):
            record = recorded(self._agent.conversation_id)
        if record is None and (recorded or not self._is_due()):
            return None
        self._agent.begin_turn()
        info = self.info = {"compacted": True, "left_out": []}
        call = await self._ask(record, info["left_out"])
        self.info = None
        if call is None:
            return None
        summary = call.parsed.message if _is_summary(call) else None
        if summary is not None:
            self._keep(call)
        turns = self._kept_turns(summary) if record is None else record["kept_turns"]
        info["kept_turns"] = turns
        if summary is None:
            info["dropped_turns"] = self.dialog.turns - turns
        self._begin_again(summary, turns, call)
        return info

    def after_call(self, call: ModelCall) -> ModelCall:
        """Remembers what was sampled; the first call after a compaction has its fork."""
        self._keep(call)
        if self._seam is None:
            return call
        (fork, shown), self._seam = self._seam, None
        return replace(call, fork=fork, new_messages=unseen(call.messages, shown))

    def check(self, system_prompt: str | None) -> None:
        """Raises `ConfigError` if the window is unknown, or has no room for the system prompt, the
        request below full notes and a summary before it would have to be compacted again."""
        ctx, most = self.dialog, self._most()
        head: list[Message] = []
        if system_prompt:
            head.append({"role": "system", "content": system_prompt})
        full = (_SOME_TEXT * ctx.max_note_chars)[: ctx.max_note_chars]
        size = self._size((*head, ctx.question(full)))
        if size + ctx.summary_tokens >= most:
            raise ConfigError(
                f"context 'compacting': a window of {self._window()} tokens is too small. The "
                f"system prompt, full notes and the request take {size} of it and a summary up to "
                f"{ctx.summary_tokens}, and a prompt may fill {max(most, 0):.0f} (`share` of the "
                "window, with room for an answer, the request and a summary): enlarge the window, "
                "or lower summary_tokens, max_note_chars or the sampling's max_tokens"
            )

    def _most(self) -> float:
        """The longest prompt of a turn: after it there must be room for an answer, and for asking
        for a summary of all that."""
        ctx, window = self.dialog, self._window()
        question = len(self._agent.prompt((ctx.question(),), None, None)[0])
        answer = self._agent.inference.sampling.max_tokens or ctx.summary_tokens
        return min(ctx.share * window, window - answer - question - ctx.summary_tokens)

    def _window(self) -> int:
        window = self._agent.context_limit
        if window is None:
            raise ConfigError(
                "context 'compacting' needs a window, and the model's is unknown: set `window`"
            )
        return window

    def _is_due(self) -> bool:
        ctx, most = self.dialog, self._most()
        messages = tuple(ctx.on_before_act())
        if not self._checked:
            system = messages[0] if messages and messages[0]["role"] == "system" else None
            self.check(system["content"] if system else None)
            self._checked = True
        return ctx.grown and self._longest(messages) > most and self._size(messages) > most

    def _longest(self, messages: tuple[Message, ...]) -> float:
        """More tokens than the prompt can have, without spelling it: a token is at least a byte,
        and a template adds few to a message."""
        previous = self._agent.previous_call
        if previous is None or previous.response.trace is None:
            return math.inf
        trace = previous.response.trace
        new = messages[len(previous.messages) + 1 :]
        added = sum(_ADDED + len(message["content"].encode()) for message in new)
        return len(trace.prompt_token_ids) + len(trace.completion_token_ids) + added

    async def _ask(self, record: Info | None, left_outs: list[int]) -> ModelCall | None:
        """Asks for a summary, and once more if the answer is not one. Returns the last call, or
        None if there is no room to ask; `left_outs` gets what each call left out."""
        agent, ctx = self._agent, self.dialog
        sampling = replace(agent.inference.sampling, max_tokens=ctx.summary_tokens)
        asked, previous, last = [ctx.question()], agent.previous_call, None
        for attempt in range(2):
            if record is None:
                left_out = self._left_out(asked, previous)
            else:
                left_out = next(iter(record["left_out"][attempt:]), None)
            if left_out is None:
                break
            left_outs.append(left_out)
            call = await agent.complete(
                ctx.asking(left_out, asked), agent.tool_request, previous, sampling
            )
            if call is None:
                break
            agent.record(call)
            last = previous = call
            if _is_summary(call):
                break
            asked += [call.parsed.message, {"role": "user", "content": AGAIN}]
        return last

    def _left_out(self, asked: Sequence[Message], previous: ModelCall | None) -> int | None:
        """How many of the oldest turns the model cannot be shown if the summary is to fit."""
        room = self._window() - self.dialog.summary_tokens
        for left_out in range(self.dialog.turns + 1):
            if self._size(self.dialog.asking(left_out, asked), previous) <= room:
                return left_out
        return None

    def _kept_turns(self, summary: Message | None) -> int:
        """How many of the last turns stay. Without a summary, the oldest one goes in any case."""
        ctx = self.dialog
        most = min(ctx.keep_turns, ctx.turns) if summary is not None else ctx.turns - 1
        room = self._most() / 2
        for turns in range(most, 0, -1):
            if self._size(ctx.beginning(summary, turns)) <= room:
                return turns
        return 0

    def _begin_again(self, summary: Message | None, kept: int, call: ModelCall) -> None:
        messages = self.dialog.begin_again(summary, kept)
        here = {id(message) for message in messages}
        self._sampled = {key: value for key, value in self._sampled.items() if key in here}
        previous, why = self._as_sampled(messages)
        self._agent.previous_call = previous
        but = f"all but the last {kept} turns"
        detail = f"{but} were dropped" if summary is None else f"a summary replaced {but}"
        detail += f"; {why}" if why else ""
        self._seam = Fork(ForkReason.COMPACTED, detail), call.messages

    def _as_sampled(self, messages: tuple[Message, ...]) -> tuple[ModelCall | None, str]:
        """The call that the next one extends: a prompt that spells `messages` up to the last
        answer, each answer in the ids that were sampled. Where the template does not let them
        stand, it has no ids, so that the next prompt is rendered; the text says why."""
        template, tools = self._agent.chat_template, self._agent.tool_request
        schemas = None if tools is None else tools.tools
        answers = [place for place, m in enumerate(messages) if m["role"] == "assistant"]
        if not answers:
            return None, ""
        trace: TokenTrace | None = None
        why = ""
        for place in answers:
            ids = self._sampled.get(id(messages[place]))
            more = (
                template.render(messages[:place], schemas)
                if trace is None
                else template.extend(messages[:place], trace, schemas)
            )
            if ids is None or isinstance(more, Fork):
                trace = None
                why = f"spelled anew: {more.detail}" if isinstance(more, Fork) else ""
                break
            before = () if trace is None else trace.token_ids
            trace = TokenTrace((*before, *more), ids[1])
        last = messages[answers[-1]]
        response = ChatResponse(trace, FinishReason.STOP)
        shown = messages[: answers[-1]]
        return ModelCall(shown, tools, (), ParsedCompletion(last), response, None, {}), why

    def _keep(self, call: ModelCall) -> None:
        if call.response.trace is not None:
            message = call.parsed.message
            self._sampled[id(message)] = message, call.response.trace.completion_token_ids

    def _size(self, messages: tuple[Message, ...], previous: ModelCall | None = None) -> int:
        agent = self._agent
        return len(agent.prompt(messages, agent.tool_request, previous or agent.previous_call)[0])


def _is_summary(call: ModelCall) -> bool:
    """Whether the answer is whole and says something besides thinking and calling tools."""
    message = call.parsed.message
    return (
        call.response.finish_reason is not FinishReason.LENGTH
        and not call.parsed.tool_calls
        and bool(without_thinking(message["content"]).strip())
    )
