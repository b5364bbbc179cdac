"""The chat completions API as programs speak it: what they ask, why some requests are refused, and
the answers, whole or as server-sent events.

Whatever a program sends is either a `ChatRequest` or an `ApiError` in the API's format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ludic.agents.model_calls import ModelCall
from ludic.inference.client import ToolRequest
from ludic.inference.openai_client import tool_call_of, wire_messages
from ludic.inference.templates.tool_parsers import MalformedCallError
from ludic.parsers import strict_json
from ludic.types import FinishReason, Message

_CONSTRAINS = "it constrains what the model may write, which cannot be trained on"
_DISTORTS = "it changes the distribution in a way that cannot be trained on"
_ONE = "each request is one sample; ask again for another"
_ABSENT = "this server does not have it"

_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), _ONE),
    "best_of": ((1,), _ONE),
    "presence_penalty": ((0,), _DISTORTS),
    "frequency_penalty": ((0,), _DISTORTS),
    "repetition_penalty": ((1,), _DISTORTS),
    "logit_bias": (({},), _DISTORTS),
    "response_format": (({"type": "text"},), _CONSTRAINS),
    "tool_choice": (("auto", "none"), _CONSTRAINS),
    "parallel_tool_calls": ((True,), _CONSTRAINS),
    "functions": (([],), "send them as `tools`"),
    "function_call": (("auto", "none"), "send `tools` and `tool_choice`"),
    "logprobs": ((False,), _ABSENT),
    "top_logprobs": ((0,), _ABSENT),
    "modalities": ((["text"],), _ABSENT),
    "audio": ((), _ABSENT),
    "prediction": ((), _ABSENT),
    "moderation": ((), _ABSENT),
    "web_search_options": ((), _ABSENT),
}
"""Settings that may only have these values (or none), and why."""

OVERRULED = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Sampling settings for which the run's values hold, whatever a request asks for."""

_WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
    *("reasoning_effort", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
_READ = ("model", "messages", "tools", "stream", "stream_options", "stop")
_LIMITS = ("max_tokens", "max_completion_tokens")
_KNOWN = {*_READ, *_LIMITS, *_REFUSED, *OVERRULED, *_WITHOUT_EFFECT}

_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_ROLES["developer"] = "system"
_KEYS = {"system": {"name"}, "user": {"name"}, "tool": {"name", "tool_call_id"}}


class ApiError(Exception):
    """What a program is answered instead of a completion."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error in the API's format."""
        kind = {429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for a completion. `overruled` are the sampling settings that it asks for."""

    messages: tuple[Message, ...]
    tools: ToolRequest | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    overruled: Mapping[str, Any] = field(default_factory=dict)


def read_request(body: bytes) -> ChatRequest:
    """The request in a body; an `ApiError` says what is wrong with it, and where."""
    try:
        data = strict_json(body.decode())
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except ValueError as exc:
        raise ApiError(400, f"the body is not JSON: {exc}") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    if unknown := sorted(data.keys() - _KNOWN):
        message = f"unknown argument {unknown[0]!r}: leave it out"
        raise ApiError(400, message, param=unknown[0], code="unknown_parameter")
    data = {name: value for name, value in data.items() if value is not None}
    for name in data.keys() & _REFUSED.keys():
        _check_refused(name, data[name])
    _typed(data, "model", str, required=True)
    for name in data.keys() & set(OVERRULED):
        _typed(data, name, int | float)
    options = _typed(data, "stream_options", dict) or {}
    limits = [_limit(data, name) for name in _LIMITS if name in data]
    hidden = data.get("tool_choice") == "none"
    return ChatRequest(
        messages=_messages(_typed(data, "messages", list, required=True)),
        tools=None if hidden else _tools(_typed(data, "tools", list) or []),
        max_tokens=min(limits, default=None),
        stop=_stop(data.get("stop", [])),
        stream=_typed(data, "stream", bool) or False,
        include_usage=_typed(options, "include_usage", bool, "stream_options.") or False,
        overruled={name: data[name] for name in OVERRULED if name in data},
    )


def _check_refused(name: str, value: Any) -> None:
    allowed, why = _REFUSED[name]
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
        return
    message = f"{name} = {_short(value)} is refused: {why}"
    raise ApiError(400, message, param=name, code="unsupported_value")


def _typed(
    data: Mapping[str, Any], name: str, kind: Any, at: str = "", *, required: bool = False
) -> Any:
    value = data.get(name)
    if value is None:
        if required:
            raise ApiError(
                400, f"{at}{name!r} is missing", param=at + name, code="missing_required_parameter"
            )
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}
        message = f"{at}{name} = {_short(value)}: must be {words.get(kind, 'a number')}"
        raise ApiError(400, message, param=at + name, code="invalid_type")
    return value


def _limit(data: Mapping[str, Any], name: str) -> int:
    value: int = _typed(data, name, int)
    if value < 1:
        raise ApiError(400, f"{name} = {value}: must be at least 1", param=name)
    return value


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ApiError(
            400, f"stop = {_short(value)}: must be a string or a list of strings", param="stop"
        )
    return tuple(texts)


def _tools(given: Sequence[Any]) -> ToolRequest | None:
    for number, tool in enumerate(given):
        at = f"tools.{number}"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ApiError(400, f"{at}: only tools of the type 'function' are known", param=at)
        function = _typed(tool, "function", dict, f"{at}.", required=True)
        _typed(function, "name", str, f"{at}.function.", required=True)
        _typed(function, "parameters", dict, f"{at}.function.")
    return ToolRequest(list(given)) if given else None


def _messages(given: Sequence[Any]) -> tuple[Message, ...]:
    if not given:
        raise ApiError(400, "'messages' is empty: send at least one", param="messages")
    called: dict[str, str] = {}
    return tuple(_message(raw, f"messages.{n}", called) for n, raw in enumerate(given))


def _message(raw: Any, at: str, called: dict[str, str]) -> Message:
    """One message as templates take it. `called` collects the names of the tools that were called,
    by the calls' ids: templates may want a tool's name with its answer."""
    if not isinstance(raw, dict):
        raise ApiError(400, f"{at} must be an object", param=at, code="invalid_type")
    role = _ROLES.get(_typed(raw, "role", str, f"{at}.", required=True))
    if role is None:
        message = f"{at}.role = {_short(raw['role'])}: must be one of {', '.join(_ROLES)}"
        raise ApiError(400, message, param=f"{at}.role", code="invalid_value")
    # What an assistant's message has besides, clients send back as they got it from somewhere.
    unknown = sorted(raw.keys() - {"role", "content", *_KEYS.get(role, raw)})
    if unknown:
        message = f"{at} has an unknown key {unknown[0]!r}: leave it out"
        raise ApiError(400, message, param=f"{at}.{unknown[0]}", code="unknown_parameter")
    content = _text(raw.get("content"), f"{at}.content", required=role != "assistant")
    parsed: Message = {"role": role, "content": content}  # type: ignore[typeddict-item]
    if role == "assistant" and (calls := _typed(raw, "tool_calls", list, f"{at}.")):
        try:
            parsed["tool_calls"] = [tool_call_of(call, n) for n, call in enumerate(calls)]
        except MalformedCallError as exc:
            raise ApiError(400, f"{at}: {exc}", param=f"{at}.tool_calls") from None
        called |= {call["id"]: call["function"]["name"] for call in parsed["tool_calls"]}
    if role == "tool":
        parsed["tool_call_id"] = _typed(raw, "tool_call_id", str, f"{at}.", required=True)
        if name := called.get(parsed["tool_call_id"]):
            parsed["name"] = name
    if role != "assistant" and (name := _typed(raw, "name", str, f"{at}.")):
        parsed["name"] = name
    return parsed


def _text(content: Any, at: str, *, required: bool) -> str:
    if content is None and not required:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        message = f"{at} = {_short(content)}: must be a string or a list of text parts"
        raise ApiError(400, message, param=at, code="invalid_type")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise ApiError(400, f"{at}: only parts of text can be read", param=at)
        texts.append(text)
    return "\n".join(texts)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program is given for one model call; the same again whenever the call is repeated."""

    id: str
    created: int
    model: str
    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def completion(self) -> dict[str, Any]:
        """The answer as one object."""
        choice = {
            "index": 0,
            "message": self._wire(),
            "logprobs": None,
            "finish_reason": self.finish_reason,
        }
        return {**self._envelope("chat.completion"), "choices": [choice], "usage": self._usage()}

    def events(self, *, include_usage: bool) -> Iterator[bytes]:
        """The answer as server-sent events. It was sampled whole, and comes in few parts."""
        wire = self._wire()
        parts: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if wire["content"]:
            parts.append({"content": wire["content"]})
        for index, call in enumerate(wire.get("tool_calls", ())):
            parts.append({"tool_calls": [{"index": index, **call}]})
        for delta in parts:
            yield self._chunk([{"index": 0, "delta": delta, "finish_reason": None}], include_usage)
        end = {"index": 0, "delta": {}, "finish_reason": self.finish_reason}
        yield self._chunk([end], include_usage)
        if include_usage:
            yield self._chunk([], include_usage, usage=self._usage())
        yield b"data: [DONE]\n\n"

    def _chunk(
        self, choices: list[Any], include_usage: bool, usage: dict[str, int] | None = None
    ) -> bytes:
        data = {**self._envelope("chat.completion.chunk"), "choices": choices}
        if include_usage:
            data["usage"] = usage
        return f"data: {json.dumps(data)}\n\n".encode()

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _wire(self) -> dict[str, Any]:
        wire = wire_messages([self.message])[0]
        if not wire["content"] and wire.get("tool_calls"):
            wire["content"] = None
        return {**wire, "refusal": None}

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def answer_of(
    call: ModelCall, stop: tuple[str, ...], *, id: str, created: int, model: str
) -> Answer:
    """The answer that a call gives to a program. Text from a stop string on is not shown, though
    its tokens were sampled and are recorded."""
    message = cast(Message, dict(call.parsed.message))
    ends = [at for text in stop if (at := message["content"].find(text)) >= 0]
    if ends:
        message["content"] = message["content"][: min(ends)]
    trace = call.response.trace
    reason = "tool_calls" if call.parsed.tool_calls else "stop"
    return Answer(
        id=id,
        created=created,
        model=model,
        message=message,
        finish_reason="length" if call.response.finish_reason is FinishReason.LENGTH else reason,
        prompt_tokens=len(trace.prompt_token_ids) if trace else 0,
        completion_tokens=len(trace.completion_token_ids) if trace else 0,
    )
