"""The bodies of OpenAI-compatible requests and answers, and what they mean here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ludic.errors import InferenceError, RequestRejectedError
from ludic.inference.http import excerpt
from ludic.inference.sampling import SamplingConfig
from ludic.inference.templates.tool_parsers import MalformedCallError, read_json
from ludic.types import ChatResponse, FinishReason, Message, TokenTrace, ToolCall

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "content_filter": FinishReason.ABORT,
}

_POLICY = ("presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty")
_OF_VLLM = ("top_k", "min_p", "repetition_penalty", "stop_token_ids")
# The value at which a setting does nothing.
_OFF: dict[str, Any] = {
    **{"max_tokens": None, "seed": None, "stop": [], "stop_token_ids": []},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
}


def sampling_body(sampling: SamplingConfig, dialect: Literal["openai", "vllm"]) -> dict[str, Any]:
    """The sampling settings as entries of a request's body; what is off is left out, but for what
    vLLM would then take from the model's own generation settings. Raises `RequestRejectedError`
    for a setting that the dialect has no word for."""
    values = {name: getattr(sampling, name) for name in ("temperature", "top_p", *_OFF)}
    values = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
    asked = {n: v for n, v in values.items() if n not in _OFF or v != _OFF[n]}
    if dialect == "openai":
        if unknown := [name for name in _OF_VLLM if name in asked]:
            raise RequestRejectedError(
                f"the OpenAI interface has no {', '.join(unknown)}: leave them off, or set "
                "dialect='vllm' for a server that understands them"
            )
        return asked
    body = asked | {name: values[name] for name in _POLICY}
    if sampling.stop:
        # The tokens that spell a stop string were sampled: they stay part of the completion.
        body["include_stop_str_in_output"] = True
    return body


def wire_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the interface takes them: a tool call's arguments are JSON text there."""
    found: list[dict[str, Any]] = []
    for message in messages:
        wire: dict[str, Any] = dict(message)
        if calls := message.get("tool_calls"):
            wire["tool_calls"] = [
                {
                    **call,
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for call in calls
            ]
        found.append(wire)
    return found


def completion_response(
    answer: Any, prompt_token_ids: tuple[int, ...], *, trust_logprobs: bool
) -> ChatResponse:
    """An answer of `/completions`. The trace is None unless the answer holds token ids with as
    many log-probs, and those are trusted to be of the sampled distribution."""
    choice = choice_of(answer)
    text = choice.get("text")
    if not isinstance(text, str):
        raise InferenceError(f"the server's completion has no text: {excerpt(choice)}")
    ids: Any = choice.get("token_ids")
    logprobs: Any = (choice.get("logprobs") or {}).get("token_logprobs")
    trace = None
    if trust_logprobs and _is_list_of(ids, int) and _is_list_of(logprobs, int | float):
        if len(ids) != len(logprobs):
            raise InferenceError(
                f"the server returned {len(ids)} token ids and {len(logprobs)} log-probs"
            )
        if all(math.isfinite(lp) for lp in logprobs):
            trace = TokenTrace(prompt_token_ids, tuple(ids), tuple(map(float, logprobs)))
    return ChatResponse(trace, finish_reason(choice), text, _info(answer))


def chat_response(answer: Any) -> ChatResponse:
    """An answer of `/chat/completions`: text, and tool calls in `info`."""
    choice = choice_of(answer)
    message = choice.get("message")
    if not isinstance(message, Mapping):
        raise InferenceError(f"the server's completion has no message: {excerpt(choice)}")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise InferenceError(f"the server's message is not text: {excerpt(message)}")
    calls: list[ToolCall] = []
    errors: list[str] = []
    for number, wire in enumerate(message.get("tool_calls") or []):
        try:
            calls.append(tool_call_of(wire, number))
        except MalformedCallError as exc:
            errors.append(str(exc))
    info = _info(answer)
    if calls:
        info["tool_calls"] = calls
    if errors:
        info["tool_call_errors"] = errors
    return ChatResponse(None, finish_reason(choice), content or "", info)


def choice_of(answer: Any) -> Mapping[str, Any]:
    """The completion in an answer."""
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise InferenceError(f"the server's answer has no choices: {excerpt(answer)}")
    return choices[0]


def finish_reason(choice: Mapping[str, Any]) -> FinishReason:
    """Why the model stopped."""
    reason = choice.get("finish_reason")
    if reason not in _FINISH_REASONS:
        raise InferenceError(
            f"the server ended a completion for the unknown reason {reason!r}; "
            f"known are {sorted(_FINISH_REASONS)}"
        )
    return _FINISH_REASONS[reason]


def tool_call_of(wire: Any, number: int) -> ToolCall:
    """A tool call as the interface writes it. Raises `MalformedCallError` for what is none."""
    function = wire.get("function") if isinstance(wire, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MalformedCallError(f"tool call {number} has no function name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise MalformedCallError(
            f"the arguments of {function['name']!r} must be a JSON object, "
            f"not {type(arguments).__name__}"
        )
    return {
        "id": str(wire.get("id") or f"call_{number}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _info(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {k: answer[k] for k in ("id", "model", "usage") if answer.get(k) is not None}


def _is_list_of(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )
