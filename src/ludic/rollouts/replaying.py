"""Replay: runs a recorded episode again and reports where it first differs, if it does.

The episode goes through the same protocol as the first time, with the recorded seeds. What the
model said comes from the record, so that neither a model nor a tokenizer is needed: tools, parsers,
bots and the environment run again, and every message, action, observation, reward, ending and info
is compared. An environment may tell more by now, in its info, than it did. Given a chat template,
prompts are rendered again too and compared token by token. Given a runtime, nothing comes from the
record: the model samples again with the recorded seeds, which must give the same tokens where the
backend is deterministic and has the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ludic.errors import InferenceError, RolloutError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.sampling import InferenceSpec
from ludic.inference.templates.chat_template import ChatTemplate, ParsedCompletion
from ludic.interaction.base import Runtime
from ludic.registry import stored_names
from ludic.rollouts.episode_runner import EnvFactory, EpisodeRunner, ProtocolFactory
from ludic.rollouts.requests import PlannedEpisode, RolloutRequest
from ludic.rollouts.storage import shared_length
from ludic.types import (
    AgentStep,
    ChatResponse,
    EnvironmentStep,
    Fork,
    ForkReason,
    Info,
    Message,
    Rollout,
    Step,
    TokenTrace,
    TruncationReason,
    from_json,
)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found: the first divergence, if any, and how much agreed up to there."""

    divergence: Divergence | None
    steps: int
    tokens: int
    rollouts: tuple[Rollout, ...]
    """What the replay produced."""

    @property
    def matches(self) -> bool:
        return self.divergence is None


async def replay(
    rollouts: Rollout | Sequence[Rollout],
    *,
    runtime: Runtime | None = None,
    chat_template: ChatTemplate | None = None,
    env_registry: Mapping[str, EnvFactory] | None = None,
    protocol_registry: Mapping[str, ProtocolFactory] | None = None,
    step_timeout_s: float | None = 60.0,
    episode_timeout_s: float | None = 600.0,
) -> ReplayReport:
    """Runs the episode of `rollouts` again and compares. An episode of several agents needs the
    rollouts of all of them.

    With `runtime` the model samples again; with `chat_template` only prompts are made again; with
    neither, messages stand for tokens. Raises `RolloutError` for rollouts that do not say where
    they come from, or are of different episodes.
    """
    recorded = [rollouts] if isinstance(rollouts, Rollout) else list(rollouts)
    episode, max_steps = _episode_of(recorded)
    tape = Tape(recorded)
    with_tokens = runtime is not None or chat_template is not None
    if runtime is None:
        runtime = Runtime(
            TapeClient(tape, with_tokens=with_tokens),
            TapeTemplate(tape) if chat_template is None else chat_template,
            "replay",
        )
        # A tape ignores sampling settings.
        episode = replace(episode, request=replace(episode.request, inference=None))
    runner = EpisodeRunner(
        env_registry, protocol_registry, runtime, step_timeout_s, episode_timeout_s
    )
    with stored_names():  # whoever wrote the file must not choose what is imported here
        replayed = await runner.run(episode, max_steps)
    _check_errors(recorded, replayed, tape)
    return _compared(recorded, replayed, with_tokens)


def _episode_of(rollouts: Sequence[Rollout]) -> tuple[PlannedEpisode, int]:
    if not rollouts:
        raise RolloutError("replay needs at least one rollout")
    first = rollouts[0]
    episodes = {r.episode_id for r in rollouts}
    if len(episodes) > 1:
        raise RolloutError(f"replay takes the rollouts of one episode, not of {sorted(episodes)}")
    if first.env is None or first.protocol is None or first.env_seed is None:
        raise RolloutError(
            f"rollout {first.id!r} does not say which environment, protocol and seed it comes "
            "from: only rollouts of a RolloutEngine can be replayed"
        )
    inference = first.meta.get("inference")
    request = RolloutRequest(
        first.env,
        first.protocol,
        inference=None if inference is None else from_json(InferenceSpec, json.dumps(inference)),
    )
    seed = first.sampling_seed if first.sampling_seed is not None else 0
    episode = PlannedEpisode(first.episode_id, request, first.env_seed, seed)
    return episode, int(first.meta.get("max_steps", 100))


def _check_errors(recorded: Sequence[Rollout], replayed: Sequence[Rollout], tape: Tape) -> None:
    """A replay that could not be run at all is an error and not a divergence."""
    if tape.unknown is not None:
        raise RolloutError(
            f"the episode has a rollout {tape.unknown!r} that replay was not given: pass all "
            f"rollouts of episode {recorded[0].episode_id!r}"
        )
    known = {r.id for r in recorded}
    failed = next((r for r in replayed if r.error is not None and r.id not in known), None)
    if failed is not None:
        raise RolloutError(f"the episode could not be run again: {failed.error}")


def _compared(
    recorded: Sequence[Rollout], replayed: Sequence[Rollout], with_tokens: bool
) -> ReplayReport:
    by_id = {r.id: r for r in replayed}
    found: list[Divergence] = []
    steps = tokens = 0
    for rollout in recorded:
        again = by_id.get(rollout.id)
        if again is None:
            found.append(Divergence(rollout.id, 0, "rollout", "there", None))
            continue
        divergence, same_steps, same_tokens = first_divergence(
            rollout, again, with_tokens=with_tokens
        )
        steps, tokens = steps + same_steps, tokens + same_tokens
        if divergence is not None:
            found.append(divergence)
    extra = [r for r in replayed if r.id not in {one.id for one in recorded}]
    found.extend(Divergence(r.id, 0, "rollout", None, "there") for r in extra)
    first = min(found, key=lambda d: d.step, default=None)
    return ReplayReport(first, steps, tokens, tuple(replayed))


class _RecordEnded(InferenceError):
    """The replay asks for a model call that the record does not have."""


class Tape:
    """The recorded model calls of each conversation, to be taken in order."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self._rollouts = {r.id: r for r in rollouts}
        self._calls = {r.id: list(r.agent_steps) for r in rollouts}
        self._next = dict.fromkeys(self._calls, 0)
        self._compactions = {r.id: _compactions(r) for r in rollouts}
        self.unknown: str | None = None

    def take(self, conversation_id: str | None) -> tuple[str, int]:
        """The place of the conversation's next call."""
        if conversation_id not in self._calls or conversation_id is None:
            self.unknown = str(conversation_id)
            raise _RecordEnded(f"no rollout {conversation_id!r} was given")
        number = self._next[conversation_id]
        if number == len(self._calls[conversation_id]):
            raise _RecordEnded(f"rollout {conversation_id!r} has {number} model calls, not more")
        self._next[conversation_id] = number + 1
        return conversation_id, number

    def compaction(self, conversation_id: str | None) -> Info | None:
        """The `info` of the compaction that the conversation's next call belongs to, if any."""
        of_conversation = self._compactions.get(conversation_id or "", {})
        return of_conversation.get(self._next.get(conversation_id or "", 0))

    def is_full(self, conversation_id: str | None, calls: int) -> bool:
        """Whether the model's context was full here, `calls` calls into a turn: the record has the
        turn end without another one."""
        rollout = self._rollouts.get(conversation_id or "")
        if rollout is None or rollout.error is not None:
            return False
        made, number = self._calls[rollout.id], self._next[rollout.id]
        if number == len(made):
            return calls > 0 or rollout.truncation_reason is TruncationReason.CONTEXT_WINDOW
        return calls > 0 and made[number].turn_index != made[number - 1].turn_index

    def call_at(self, rollout_id: str, number: int) -> AgentStep:
        """The recorded call at a place that `take` gave."""
        return self._calls[rollout_id][number]


def _compactions(rollout: Rollout) -> dict[int, Info]:
    """Where the rollout's dialogue was compacted: the `info`, by the number of the first call."""
    calls = [place for place, step in enumerate(rollout.steps) if isinstance(step, AgentStep)]
    return {
        calls.index(step.agent_steps[0]): step.info
        for step in rollout.env_steps
        if step.info.get("compacted") and step.agent_steps
    }


class TapeClient:
    """Returns, for each conversation's calls, what was recorded for them."""

    def __init__(self, tape: Tape, *, with_tokens: bool) -> None:
        self._tape = tape
        self._with_tokens = with_tokens

    @property
    def max_context_tokens(self) -> int | None:
        return None

    def compaction(self, conversation_id: str | None) -> Info | None:
        """As for an agent that asks whether its dialogue was compacted here."""
        return self._tape.compaction(conversation_id)

    def is_full(self, conversation_id: str | None, calls: int) -> bool:
        """As for an agent that asks whether its context was full here."""
        return self._tape.is_full(conversation_id, calls)

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        place = self._tape.take(request.conversation_id)
        step = self._tape.call_at(*place)
        trace = None
        if self._with_tokens:
            if step.trace is None:
                raise _RecordEnded("the record has no token ids: replay it without a template")
            trace = replace(step.trace, prompt_token_ids=request.prompt_token_ids)
        return ChatResponse(trace, step.finish_reason, info={"replayed_from": list(place)})

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        raise NotImplementedError("a record has no weights")


class TapeTemplate:
    """Stands where a template would: messages pass as they were recorded, without tokens."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        return []

    def extend(
        self,
        messages: Sequence[Message],
        previous: TokenTrace,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int] | Fork:
        return Fork(ForkReason.TEMPLATE_NOT_EXTENSIBLE)

    def parse(self, response: ChatResponse) -> ParsedCompletion:
        step = self._tape.call_at(*response.info["replayed_from"])
        calls = tuple(step.message.get("tool_calls", ()))
        # Errors of the tools themselves are recorded in the same place; only calls that could
        # not be read have no tool message that names a call.
        unread = sum("tool_call_id" not in m for m in step.tool_messages)
        errors = step.tool_call_errors[:unread] if step.tool_messages else step.tool_call_errors
        return ParsedCompletion(step.message, calls, errors)


_OUTSIDE = {
    TruncationReason.CONTEXT_WINDOW,
    TruncationReason.DEADLINE,
    TruncationReason.ERROR,
}
"""Endings that come from a backend or a clock: the record ends there, and so may the replay."""

_PER_TOKEN = ("prompt_token_ids", "completion_token_ids", "completion_logprobs")


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place at which the replay differs: `field` of step `step` of a rollout, and for
    token ids and log-probs the position `token` within it."""

    rollout_id: str
    step: int
    field: str
    recorded: Any
    replayed: Any
    token: int | None = None

    def __str__(self) -> str:
        at = "" if self.token is None else f", token {self.token}"
        was, now = _shortened(repr(self.recorded), repr(self.replayed))
        return (
            f"rollout {self.rollout_id!r}, step {self.step}{at}: {self.field} was {was} and is "
            f"now {now}"
        )


def first_divergence(
    recorded: Rollout, replayed: Rollout, *, with_tokens: bool
) -> tuple[Divergence | None, int, int]:
    """The first divergence of one rollout, and how many steps and sampled tokens agree."""
    tokens = 0
    ended_outside = recorded.error is not None or recorded.truncation_reason in _OUTSIDE
    for index, old in enumerate(recorded.steps):
        if index >= len(replayed.steps):
            cause = replayed.error or "ended"
            return Divergence(recorded.id, index, "step", old.kind, cause), index, tokens
        last = index + 1 == len(recorded.steps)
        cut_outside = isinstance(old, EnvironmentStep) and old.truncation_reason in _OUTSIDE
        ending = not (last and cut_outside)
        told = old.info if isinstance(old, EnvironmentStep) else {}
        facts = (_facts(s, with_tokens, ending, told) for s in (old, replayed.steps[index]))
        # The lists of facts stay in step: what decides the next entries is itself compared.
        for (name, before), (_, after) in zip(*facts, strict=False):
            if not _same(name, before, after):
                return _divergence(recorded.id, index, name, before, after), index, tokens
        if isinstance(old, AgentStep) and old.trace is not None:
            tokens += len(old.trace.completion_token_ids)
    count = len(recorded.steps)
    if len(replayed.steps) > count and not ended_outside:
        more = replayed.steps[count].kind
        return Divergence(recorded.id, count, "step", "ended", more), count, tokens
    return None, count, tokens


def _facts(step: Step, with_tokens: bool, ending: bool, told: Info) -> Iterator[tuple[str, Any]]:
    """What is compared of a step, in order, by name. Of its info, what was `told` then."""
    yield from _named(step, "kind", "turn_index")
    if isinstance(step, AgentStep):
        yield from _named(step, "new_messages")
        if with_tokens:
            yield "trace", step.trace is not None
            if step.trace is not None:
                yield from _named(step.trace, *_PER_TOKEN)
        yield from _named(step, "message", "finish_reason", "tool_messages")
        return
    yield from _named(step, "stepped", "obs", "action", "next_obs", "reward", "terminated")
    if ending:
        yield from _named(step, "truncated", "truncation_reason")
        keys = sorted(key for key in step.info if key in told)
        yield "keys of info", keys
        yield from ((f"info[{key!r}]", step.info[key]) for key in keys)


def _named(owner: Any, *names: str) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(owner, name)) for name in names)


def _same(name: str, before: Any, after: Any) -> bool:
    if name.startswith("info["):  # as JSON: NaN equals itself, and true is not 1
        return json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)
    return bool(before == after or (before != before and after != after))


def _divergence(rollout_id: str, step: int, name: str, before: Any, after: Any) -> Divergence:
    if name not in _PER_TOKEN or before is None or after is None:
        return Divergence(rollout_id, step, name, before, after)
    at = shared_length(before, after)
    was, now = (ids[at] if at < len(ids) else None for ids in (before, after))
    return Divergence(rollout_id, step, name, was, now, token=at)


def _shortened(a: str, b: str, limit: int = 160) -> tuple[str, str]:
    """Both texts; long ones from shortly before the first character that differs."""
    if max(len(a), len(b)) <= limit:
        return a, b
    start = max(shared_length(a, b) - 20, 0)

    def part(text: str) -> str:
        after = "…" if len(text) > start + limit else ""
        return ("…" if start else "") + text[start : start + limit] + after

    return part(a), part(b)
