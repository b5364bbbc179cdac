"""The data that everything else passes around: messages, token traces, steps, rollouts.

All of it is immutable and holds only JSON values, so that `to_json` and `from_json` are
inverse to each other: `from_json(Rollout, to_json(rollout)) == rollout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from math import fsum, isfinite
from typing import Any, ClassVar, Literal, NotRequired, TypeAlias

from msgspec import field
from msgspec.structs import force_setattr
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from ludic.errors import DataError
from ludic.plumbing.records import JsonObject, Numbers, Record, changed, encode
from ludic.plumbing.records import check_json as check_json
from ludic.plumbing.records import from_json as from_json
from ludic.plumbing.records import to_json as to_json

AgentID: TypeAlias = str
Obs: TypeAlias = str
Action: TypeAlias = str
Info: TypeAlias = JsonObject
"""Extra facts about a step. The values must be JSON: None, bool, int, float, str, list, dict."""


class FunctionCall(TypedDict):
    """The function half of a tool call; `arguments` is a JSON object."""

    name: str
    arguments: JsonObject


class ToolCall(TypedDict):
    """A model's request to run a tool, in the shape that chat templates expect."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """One chat message: a plain dict, as chat templates take it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class FinishReason(StrEnum):
    """Why the model stopped writing. Never to be confused with an episode's ending."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class TruncationReason(StrEnum):
    """Which limit cut an episode that the environment had not ended."""

    ENV_LIMIT = "env_limit"
    MAX_STEPS = "max_steps"
    CONTEXT_WINDOW = "context_window"
    DEADLINE = "deadline"
    ERROR = "error"
    BUDGET = "budget"


class ForkReason(StrEnum):
    """Why a prompt is a full rendering and not an extension of what was sampled before."""

    HISTORY_REWRITTEN = "history_rewritten"
    THINKING_STRIPPED = "thinking_stripped"
    TOOL_CALL_RERENDERED = "tool_call_rerendered"
    CONTENT_RERENDERED = "content_rerendered"
    TEMPLATE_NOT_EXTENSIBLE = "template_not_extensible"
    TOOLS_CHANGED = "tools_changed"
    COMPACTED = "compacted"


class VersionSpan(Record, frozen=True):
    """The policy version that sampled the completion's tokens `start` to `end` (exclusive).

    `attempt` counts the trainers of a run over Redis, whose versions may have the same number: the
    pair names one policy. Everywhere else it is 0.
    """

    start: int
    end: int
    version: int
    attempt: int = 0


class TokenTrace(Record, frozen=True):
    """The exact tokens of one model call: what went in, what was sampled, how likely it was.

    `completion_logprobs` are those of the distribution that was sampled from (after temperature
    and truncation), in float32. `kept_token_ids`, when recorded, lists for every completion token
    the ids that truncated sampling had kept; an empty tuple stands for the whole vocabulary.
    `version_spans` cover the completion, token by token, or are empty where nothing is known.
    Ids and log-probs that came over Redis are views of arrays, which read as these tuples do.
    """

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    completion_logprobs: tuple[float, ...] | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    kept_token_ids: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        # A list would never equal a tuple, so a prompt that extends another would look forked.
        for name in ("prompt_token_ids", "completion_token_ids", "completion_logprobs"):
            value = getattr(self, name)
            if isinstance(value, list):
                force_setattr(self, name, tuple(value))
            elif value is not None and not isinstance(value, (tuple, Numbers)):
                raise DataError(
                    f"TokenTrace.{name} is a {type(value).__name__}: give a tuple of plain numbers"
                )
        for name in ("prompt_token_ids", "completion_token_ids"):
            ids = getattr(self, name)
            if not are_ids(ids):
                wrong = next(i for i in ids if not are_ids((i,)))
                raise DataError(f"TokenTrace.{name} has {wrong!r}: an id is an int from 0 on")
        logprobs = self.completion_logprobs or ()
        if not all_finite(logprobs):
            bad = next(value for value in logprobs if not all_finite((value,)))
            raise DataError(
                f"TokenTrace.completion_logprobs has {bad!r}: a log-prob is a finite number"
            )
        n = len(self.completion_token_ids)
        for name in ("completion_logprobs", "kept_token_ids"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise DataError(f"TokenTrace.{name} has {len(values)} entries for {n} tokens")
        spans = self.version_spans
        starts, ends = [s.start for s in spans] + [n], [0] + [s.end for s in spans]
        if spans and (starts != ends or ends != sorted(ends)):
            named = ", ".join(f"{s.start}-{s.end}" for s in spans)
            raise DataError(
                f"TokenTrace: the version spans {named} do not cover the {n} completion tokens, "
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


class Fork(Record, frozen=True):
    """What `ChatTemplate.extend` returns when it cannot extend: the reason, and where it shows."""

    reason: ForkReason
    detail: str = ""


class ChatResponse(Record, frozen=True):
    """An inference backend's response to one request, in one form for all backends.

    `text` is the decoded completion where the backend decodes; a backend that returns only text
    leaves `trace` as None, and its responses can be shown but not trained on.
    """

    trace: TokenTrace | None
    finish_reason: FinishReason
    text: str | None = None
    info: Info = field(default_factory=dict)


class _Told(Record, frozen=True):
    """The fields of `StepOutcome` that may be given by place."""

    obs: Obs
    reward: float


class StepOutcome(_Told, frozen=True, kw_only=True):
    """What the environment tells one agent after a step.

    `terminated`: the task itself is over. `truncated`: a limit of the environment cut it.
    `reward_components` are parts of `reward`, for the record; they are not added to it. All but
    the first two are given by name, so that no call can swap the two endings.
    """

    terminated: bool = False
    truncated: bool = False
    info: Info = field(default_factory=dict)
    reward_components: Mapping[str, float] = field(default_factory=dict)


class AgentStep(Record, frozen=True, tag_field="kind", tag="agent"):
    """One model call: the prompt as tokens, the assistant's message, and its tools' results.

    `new_messages` are the messages that entered the conversation since the previous model call
    of the rollout, so that the whole dialogue can be read back without storing it once per call.
    `fork` is set when the prompt does not extend the previous call's tokens.
    """

    turn_index: int
    new_messages: tuple[Message, ...]
    message: Message
    finish_reason: FinishReason
    trace: TokenTrace | None = None
    fork: Fork | None = None
    tool_messages: tuple[Message, ...] = ()
    tool_call_errors: tuple[str, ...] = ()
    sampling: JsonObject = field(default_factory=dict)
    info: Info = field(default_factory=dict)
    kind: ClassVar[Literal["agent"]] = "agent"


class EnvironmentStep(Record, frozen=True, tag_field="kind", tag="environment"):
    """One transition as one agent saw it.

    `stepped` is False when the environment was not stepped (a parse failure); `agent_steps` are
    positions in `Rollout.steps` of the model calls that produced `action`, and empty when the
    agent did not act but heard an outcome. `reward` is the total of `reward_components` when
    there are any.
    """

    turn_index: int
    agent_steps: tuple[int, ...]
    obs: Obs
    action: Action | None
    next_obs: Obs
    reward: float
    terminated: bool = False
    truncated: bool = False
    truncation_reason: TruncationReason | None = None
    stepped: bool = True
    reward_components: Mapping[str, float] = field(default_factory=dict)
    info: Info = field(default_factory=dict)
    kind: ClassVar[Literal["environment"]] = "environment"

    def __post_init__(self) -> None:
        if not all_finite([self.reward, *self.reward_components.values()]):
            raise DataError(
                f"EnvironmentStep: reward={self.reward!r} of {dict(self.reward_components)}: "
                "rewards must be finite numbers"
            )
        if self.truncated != (self.truncation_reason is not None):
            raise DataError(
                f"EnvironmentStep: truncated={self.truncated} with truncation_reason="
                f"{self.truncation_reason}: a truncated step needs a reason, and no other may have "
                "one"
            )


Step: TypeAlias = AgentStep | EnvironmentStep


class EnvSpec(Record, frozen=True):
    """Which environment, by registered name, with which arguments. Pure data."""

    kind: str
    kwargs: JsonObject = field(default_factory=dict)


class ProtocolSpec(Record, frozen=True):
    """Which interaction protocol, by registered name, with which arguments. Pure data."""

    kind: str
    kwargs: JsonObject = field(default_factory=dict)


class Turn(Record, frozen=True):
    """The model calls that led to one environment step, and that step."""

    index: int
    agent_steps: tuple[AgentStep, ...]
    env_step: EnvironmentStep | None
    outcomes: tuple[EnvironmentStep, ...] = ()
    """Outcomes heard after the turn without having acted (another agent ended the game)."""

    @property
    def compacted(self) -> bool:
        """Whether the turn is no move, but a summary by which the dialogue was shortened."""
        return self.env_step is not None and bool(self.env_step.info.get("compacted"))

    @property
    def reward(self) -> float:
        """The turn's reward: its own step's, and what was heard before the next turn."""
        own = self.env_step.reward if self.env_step else 0.0
        return own + sum(step.reward for step in self.outcomes)


class Rollout(Record, frozen=True):
    """One agent's perspective on one episode.

    `group_id` ties rollouts that share a task and environment seed; `task_key` names the task
    across batches; `parent_id` links a sub-agent's rollout to the one that delegated to it.
    `error` is the cause when the episode failed; such a rollout is counted and not trained on.
    """

    id: str
    steps: tuple[Step, ...]
    agent_id: AgentID = "agent"
    episode_id: str = ""
    group_id: str | None = None
    task_key: str | None = None
    parent_id: str | None = None
    env: EnvSpec | None = None
    protocol: ProtocolSpec | None = None
    env_seed: int | None = None
    sampling_seed: int | None = None
    error: str | None = None
    meta: Info = field(default_factory=dict)

    def __post_init__(self) -> None:
        acted: set[int] = set()
        steps = self.steps
        for index, step in enumerate(steps):
            if isinstance(step, AgentStep) or not step.agent_steps:
                continue
            if step.turn_index in acted:
                raise DataError(f"rollout {self.id!r}: turn {step.turn_index} has two actions")
            acted.add(step.turn_index)
            for call in step.agent_steps:
                if not (0 <= call < index and isinstance(steps[call], AgentStep)):
                    raise DataError(
                        f"rollout {self.id!r}: step {index} says that step {call} is the model"
                        " call behind its action, but there is no model call at that place before "
                        "it"
                    )

    def labelled(self, **labels: Any) -> Rollout:
        """The same steps under other labels: any field but `steps`."""
        return changed(self, **labels)

    @property
    def agent_steps(self) -> tuple[AgentStep, ...]:
        return tuple([s for s in self.steps if isinstance(s, AgentStep)])

    @property
    def env_steps(self) -> tuple[EnvironmentStep, ...]:
        return tuple([s for s in self.steps if isinstance(s, EnvironmentStep)])

    @property
    def total_reward(self) -> float:
        """The undiscounted sum of every reward this agent received, rounded once: ten of 0.1 are
        1, and the order does not matter."""
        rewards = [s.reward for s in self.steps if isinstance(s, EnvironmentStep)]
        try:
            return fsum(rewards)
        except OverflowError:
            return sum(rewards)

    @property
    def terminated(self) -> bool:
        return any(s.terminated for s in self.env_steps)

    @property
    def truncated(self) -> bool:
        return any(s.truncated for s in self.env_steps)

    @property
    def truncation_reason(self) -> TruncationReason | None:
        return next((s.truncation_reason for s in reversed(self.env_steps) if s.truncated), None)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, over all model calls."""
        return sum([len(s.trace.completion_token_ids) for s in self.agent_steps if s.trace])

    def turns(self) -> Iterator[Turn]:
        """The rollout as turns, in order. Outcomes heard before the first turn count to it."""
        by_index: dict[int, list[Step]] = {}
        for step in self.steps:
            by_index.setdefault(step.turn_index, []).append(step)
        for index in sorted(by_index):
            calls: list[AgentStep] = []
            acted: EnvironmentStep | None = None
            heard: list[EnvironmentStep] = []
            for step in by_index[index]:
                if isinstance(step, AgentStep):
                    calls.append(step)
                elif step.agent_steps:
                    acted = step
                else:
                    heard.append(step)
            yield Turn(index, tuple(calls), acted, tuple(heard))


RolloutStepKey: TypeAlias = tuple[str, int]
"""(rollout id, turn index): what credit is assigned to."""


def are_ids(values: Sequence[int]) -> bool:
    """Whether these are plain ints from 0 on. Prompts are long, so nothing here looks at single
    ids: only such ints are written in nothing but digits."""
    if type(values) is Numbers:
        return bool(values.array.dtype.kind == "i")
    try:
        return not encode(values)[1:-1].translate(None, b"0123456789,")
    except (TypeError, ValueError, OverflowError, RecursionError):  # NumPy's integers, for one
        return False


def all_finite(values: Sequence[float]) -> bool:
    """Whether all of them are numbers, and none is NaN, infinite or beyond what a float holds."""
    if type(values) is Numbers:
        return True
    try:
        if isfinite(fsum(values)):  # at half the price of looking at each
            return True
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        return all(map(isfinite, values))
    except (TypeError, OverflowError):
        return False
