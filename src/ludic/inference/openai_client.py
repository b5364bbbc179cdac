"""A client of any OpenAI-compatible server: for evaluation, judges and opponents.

`complete_tokens` sends the prompt's token ids to `/completions` (or their text, to servers that
take only text); `complete_messages` sends messages to `/chat/completions`. A response can be
trained on only if the server returns token ids and the log-probs of the sampled distribution;
otherwise its trace is None. The client to train with is `VLLMChatClient`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import asdict

from ludic.errors import ConfigError, InferenceError, NotTrainableError, RequestRejectedError
from ludic.inference.addresses import split_user, without_user
from ludic.inference.client import TokenCompletionRequest, completion_room
from ludic.inference.http import Connections, UnreachableError, ask, excerpt
from ludic.inference.retries import Backoff, within
from ludic.inference.sampling import SamplingConfig
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.templates.tool_parsers import MalformedCallError, read_json, tool_call
from ludic.types import ChatResponse, FinishReason, Message, TokenTrace, ToolCall

_FINISH_REASONS = {
    **dict.fromkeys(("stop", "eos", "tool_calls", "function_call"), FinishReason.STOP),
    "length": FinishReason.LENGTH,
    **dict.fromkeys(("abort", "content_filter"), FinishReason.ABORT),
}

_POLICY = ("presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty")
_OF_VLLM = ("top_k", "min_p", "repetition_penalty", "stop_token_ids")
_ALWAYS = ("temperature", "top_p")
_OFF = SamplingConfig()
"""The values at which settings do nothing."""


def sampling_body(sampling: SamplingConfig, dialect: Literal["openai", "vllm"]) -> dict[str, Any]:
    """The sampling settings as entries of a request's body; what is off is left out, but for what
    vLLM would then take from the model's own generation settings. Raises `RequestRejectedError`
    for a setting that the dialect has no word for."""
    settings = asdict(sampling)
    values = {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()}
    stated = {n: v for n, v in values.items() if n in _ALWAYS or settings[n] != getattr(_OFF, n)}
    if dialect == "openai":
        if unknown := [name for name in _OF_VLLM if name in stated]:
            raise RequestRejectedError(
                f"the OpenAI interface has no {', '.join(unknown)}: leave them off, or set "
                "dialect='vllm' for a server that understands them"
            )
        return stated
    body = stated | {name: values[name] for name in _POLICY}
    if sampling.stop:
        # The tokens that spell a stop string were sampled: they stay part of the completion.
        body["include_stop_str_in_output"] = True
    return body


def wire_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the interface takes them: a tool call's arguments are JSON text there."""
    wires: list[dict[str, Any]] = []
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
        wires.append(wire)
    return wires


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
    call = tool_call({"name": function["name"], "arguments": arguments}, number, ("arguments",))
    return {**call, "id": str(wire.get("id") or call["id"])}


def _info(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {k: answer[k] for k in ("id", "model", "usage") if answer.get(k) is not None}


def _is_list_of(value: Any, kind: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )


class OpenAIChatClient:
    """Asks the server at `base_url` (such as `http://127.0.0.1:8000/v1`).

    What may be retried (connection errors, 429, 5xx) is retried with growing, jittered pauses, at
    most `max_retries` times and always within the deadline: the request's `timeout_s`, or this
    client's. It may be asked from several event loops in several threads; at most `max_concurrency`
    requests are open at once in each. `dialect="vllm"` also sends what only vLLM understands
    (top-k, min-p, stop ids, token ids in the answer). `prompts="text"` sends text decoded with
    `chat_template`, for servers that take no ids. `reports_sampled_logprobs` says that the
    server's log-probs are those after temperature and truncation (vLLM's `processed_logprobs`).
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        chat_template: HFChatTemplate | None = None,
        prompts: Literal["token_ids", "text"] = "token_ids",
        dialect: Literal["openai", "vllm"] = "openai",
        max_context_tokens: int | None = None,
        max_concurrency: int = 32,
        timeout_s: float = 120.0,
        max_retries: int = 5,
        backoff: Backoff | None = None,
        reports_sampled_logprobs: bool = False,
    ) -> None:
        address, is_url = without_user(base_url), base_url.startswith(("http://", "https://"))
        rules = (
            (is_url, "base_url", address, "an http(s) URL"),
            (prompts in ("token_ids", "text"), "prompts", prompts, "'token_ids' or 'text'"),
            (dialect in ("openai", "vllm"), "dialect", dialect, "'openai' or 'vllm'"),
            (max_concurrency >= 1, "max_concurrency", max_concurrency, ">= 1"),
            (timeout_s > 0, "timeout_s", timeout_s, "> 0"),
            (max_retries >= 0, "max_retries", max_retries, ">= 0"),
        )
        for ok, name, value, must in rules:
            if not ok:
                raise ConfigError(f"OpenAIChatClient({name}={value!r}): must be {must}")
        if prompts == "text" and chat_template is None:
            raise ConfigError("prompts='text' needs a chat_template to decode the ids with")
        plain, headers = split_user(base_url)
        self.base_url = plain.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else headers
        self._decoding_template = chat_template if prompts == "text" else None
        self._dialect: Literal["openai", "vllm"] = dialect
        self.max_context_tokens = max_context_tokens
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._backoff = backoff or Backoff()
        self._reports_sampled_logprobs = reports_sampled_logprobs
        self._connections = Connections(repr(self), max_concurrency)
        self.retries = 0

    def __repr__(self) -> str:
        return f"OpenAIChatClient({self.base_url!r})"

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        """One completion by `/completions`; the trace is None where it cannot be trained on."""
        body = self._completion_body(request)
        answer = await self._post("completions", body, request.timeout_s)
        trusted = self._reports_sampled_logprobs or _is_plain(request.sampling)
        return completion_response(answer, request.prompt_token_ids, trust_logprobs=trusted)

    async def complete_messages(
        self,
        messages: Sequence[Message],
        *,
        model: str,
        sampling: SamplingConfig | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        timeout_s: float | None = None,
    ) -> ChatResponse:
        """One completion by `/chat/completions`: text only, never to be trained on. Tool calls
        are in `info["tool_calls"]`, unreadable ones in `info["tool_call_errors"]`."""
        if not messages:
            raise RequestRejectedError("no messages: there is nothing to complete")
        body: dict[str, Any] = {"model": model, "messages": wire_messages(messages)}
        body |= sampling_body(sampling or SamplingConfig(), self._dialect)
        if tools:
            body["tools"] = list(tools)
        return chat_response(await self._post("chat/completions", body, timeout_s))

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        """Always an error: this client cannot change the server's weights."""
        raise NotTrainableError(
            f"the weights behind {self.base_url} cannot be set by this client: publish to a "
            "LocalChatClient or a VLLMChatClient"
        )

    async def close(self) -> None:
        """Closes the connections; requests after that, and those that are open, end with
        `EngineClosedError`."""
        await self._connections.close()

    async def __aenter__(self) -> OpenAIChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _completion_body(self, request: TokenCompletionRequest) -> dict[str, Any]:
        ids = request.prompt_token_ids
        room = completion_room(ids, self.max_context_tokens, "max_context_tokens")
        if request.returns.kept_ids or request.returns.prompt_logprobs:
            raise RequestRejectedError(
                "this client returns neither kept ids nor prompt log-probs: ask a LocalChatClient "
                "or a VLLMChatClient"
            )
        template = self._decoding_template
        prompt = list(ids) if template is None else template.codec.decode(ids)
        body: dict[str, Any] = {"model": request.model, "prompt": prompt}
        body |= sampling_body(request.sampling, self._dialect)
        # A server's own default may be as low as 16 tokens: never leave it to that.
        if body.setdefault("max_tokens", room) is None:
            raise RequestRejectedError(
                "max_tokens is not set and the context length is unknown: set "
                "SamplingConfig.max_tokens, or the client's max_context_tokens"
            )
        if self._dialect == "vllm":
            body["return_token_ids"] = True
            if request.returns.logprobs:
                body["logprobs"] = 1
        body |= request.extensions.get("extra_body_overrides", {})
        return body

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float | None) -> Any:
        """The JSON answer, after as many attempts as are allowed and needed."""
        url = f"{self.base_url}/{path}"
        limit = self._timeout_s if timeout_s is None else timeout_s
        connection = await self._connections.get()
        last = ""

        def whom() -> str:
            return f"{url} (last failure: {last})" if last else url

        async with within(limit, "a completion", whom), connection.slots:
            for attempt in range(self._max_retries + 1):
                self._connections.check_open()
                try:
                    return await ask(
                        connection.session, "POST", url, body=body, headers=self._headers
                    )
                except UnreachableError as exc:
                    last, wanted = str(exc), exc.retry_after_s
                if attempt < self._max_retries:
                    self.retries += 1
                    await asyncio.sleep(self._backoff.pause_s(attempt, wanted))
        self._connections.check_open()
        raise InferenceError(
            f"{url} failed {self._max_retries + 1} times; the last time: {last}. Is the server up?"
        )


def _is_plain(sampling: SamplingConfig) -> bool:
    """Whether raw log-probs are also those of the sampled distribution."""
    return sampling.temperature == 1 and not sampling.truncates and not sampling.penalises
