"""Written dialogues as rollouts: the tokens that an assistant would have had to sample.

The prompt of an assistant message is the template's rendering of the messages before it. Its
actions are the tokens that are added when the message is rendered too, up to the token that closes
it. So the template itself determines the masks, message by message, and everything after that
(merging, credit, filters) is the same as for sampled rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ludic.errors import SerializationError, TemplateError
from ludic.inference.templates.chat_template import ChatTemplate, ClosesMessages, SpellsAnswers
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Fork,
    Message,
    Rollout,
    Step,
    TokenTrace,
)

Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
TrainOn: TypeAlias = Literal["all", "last"]
"""Which assistant messages are actions: every one, or only the last."""

_FOLLOW_UP: Message = {"role": "user", "content": "."}


def row_messages(row: Mapping[str, Any], where: str) -> tuple[list[Message], int]:
    """The dialogue of a row, and how many of its messages belong to the prompt.

    A row has `messages`, or a `prompt` and a `completion`, each of which is text or messages.
    Raises `SerializationError` for anything else.
    """
    if "messages" in row:
        return _messages(row["messages"], where), 0
    if "prompt" in row and "completion" in row:
        prompt = _spoken(row["prompt"], "user", where)
        return prompt + _spoken(row["completion"], "assistant", where), len(prompt)
    raise SerializationError(
        f"{where}: has {sorted(row)}; a row needs 'messages', or 'prompt' and 'completion', or a "
        "stored rollout: map it with row_fn"
    )


def rollout_from_messages(
    messages: Sequence[Message],
    chat_template: ChatTemplate,
    *,
    rollout_id: str,
    tools: Tools = None,
    train_on: TrainOn = "all",
    prompt_messages: int = 0,
    reward: float = 0.0,
    group_id: str | None = None,
    task_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Rollout:
    """A dialogue as a rollout: every trained assistant message is a turn, and the last one gets
    `reward`. The first `prompt_messages` are state, whoever wrote them. There are no log-probs,
    because nothing was sampled."""
    spoken = [
        i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= prompt_messages
    ]
    if not spoken:
        raise TemplateError(f"{rollout_id}: no assistant message, so there is nothing to train on")
    if spoken[0] == 0:
        raise TemplateError(f"{rollout_id}: begins with an assistant message; nothing prompts it")
    trained = spoken if train_on == "all" else spoken[-1:]
    steps: list[Step] = []
    shown = 0
    for turn, at in enumerate(trained):
        message = messages[at]
        trace = _trace(messages, at, chat_template, tools, rollout_id)
        following = messages[at + 1]["content"] if at + 1 < len(messages) else ""
        last = turn + 1 == len(trained)
        new = tuple(messages[shown:at])
        steps.append(AgentStep(turn, new, message, FinishReason.STOP, trace))
        steps.append(
            EnvironmentStep(
                turn,
                (len(steps) - 1,),
                messages[at - 1]["content"],
                message["content"],
                following,
                reward if last else 0.0,
                terminated=last,
            )
        )
        shown = at + 1
    return Rollout(
        id=rollout_id,
        steps=tuple(steps),
        episode_id=rollout_id,
        group_id=group_id,
        task_key=task_key,
        meta=dict(meta or {}),
    )


def _trace(
    messages: Sequence[Message], at: int, template: ChatTemplate, tools: Tools, where: str
) -> TokenTrace:
    """The prompt and the completion of the assistant message at `at`."""
    if not isinstance(template, ClosesMessages):
        raise TemplateError(
            f"{where}: {type(template).__name__} has no end_token_id, so it is unknown which "
            "token ends an assistant message: use HFChatTemplate"
        )
    end_id = template.end_token_id
    prompt = tuple(template.render(messages[:at], tools))
    spelled = tuple(template.render(messages[: at + 1], tools))
    if spelled[: len(prompt)] == prompt and end_id in spelled[len(prompt) :]:
        completion = spelled[len(prompt) : spelled.index(end_id, len(prompt)) + 1]
        return TokenTrace(prompt, completion)
    if isinstance(template, SpellsAnswers) and not messages[at].get("tool_calls"):
        # The text by itself, as it would be sampled after the prompt: for templates whose prompt
        # and answer share a token where they meet.
        trace = TokenTrace(prompt, template.encode_answer(messages[at]["content"]))
        following = messages[at + 1 : at + 2] or [_FOLLOW_UP]
        if not isinstance(template.extend([*messages[: at + 1], *following], trace, tools), Fork):
            return trace
    raise TemplateError(
        f"{where}, message {at}: the template spells this assistant message differently from what "
        "it would prompt for, so its tokens cannot be told from the prompt's: compare the "
        "generation prompt with how the template writes assistant messages"
    )


def _spoken(value: Any, role: Literal["user", "assistant"], where: str) -> list[Message]:
    """Text that `role` says, or the messages themselves."""
    return (
        [Message(role=role, content=value)] if isinstance(value, str) else _messages(value, where)
    )


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise SerializationError(f"{where}: messages must be a list, not {type(value).__name__}")
    messages: list[Message] = []
    for number, entry in enumerate(value):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
            raise SerializationError(f"{where}: message {number} has no role: {entry!r}")
        # Tables fill missing fields of a message with nulls.
        present = {"content": "", **{k: v for k, v in entry.items() if v is not None}}
        if not isinstance(present["content"], str):
            raise SerializationError(
                f"{where}: message {number} has content of type "
                f"{type(present['content']).__name__}; it must be text"
            )
        messages.append(present)  # type: ignore[arg-type]
    return messages
