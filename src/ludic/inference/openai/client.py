"""A client of any OpenAI-compatible server: for evaluation, judges and opponents.

`complete_tokens` sends the prompt's token ids to `/completions` (or their text, to servers that
take only text); `complete_messages` sends messages to `/chat/completions`. What comes back can be
trained on only where the server returns token ids and the log-probs of the distribution that was
sampled from; otherwise the response's trace is None. The client to train with is
`VLLMChatClient`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ludic.errors import (
    ConfigError,
    InferenceError,
    NotTrainableError,
    RequestRejectedError,
)
from ludic.inference.addresses import split_user, without_user
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.http import Connections, UnreachableError, ask
from ludic.inference.openai.wire import (
    chat_response,
    completion_response,
    sampling_body,
    wire_messages,
)
from ludic.inference.retries import Backoff, within
from ludic.inference.sampling import SamplingConfig
from ludic.inference.templates.hf import HFChatTemplate
from ludic.types import ChatResponse, Message


class OpenAIChatClient:
    """Asks the server at `base_url` (such as `http://127.0.0.1:8000/v1`).

    What may be retried (connection errors, 429, 5xx) is retried with growing, jittered pauses, at
    most `max_retries` times and always within the deadline: the request's `timeout_s`, or this
    client's. It may be asked from several event loops in several threads; at most `max_concurrency`
    requests are open at once in each. `dialect="vllm"` also sends what only vLLM understands
    (top-k, min-p, stop ids, token ids in the answer). `prompts="text"` sends text decoded with
    `chat_template`, for servers that take no ids. `extra_body` is added to every request; a None
    in it removes the entry. `reports_sampled_logprobs` says that the server's log-probs are those
    after temperature and truncation (vLLM's `processed_logprobs`).
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
        extra_body: Mapping[str, Any] | None = None,
        reports_sampled_logprobs: bool = False,
    ) -> None:
        rules = (
            (
                base_url.startswith(("http://", "https://")),
                "base_url",
                without_user(base_url),
                "an http(s) URL",
            ),
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
        self._chat_template = chat_template
        self._prompts = prompts
        self._dialect: Literal["openai", "vllm"] = dialect
        self._max_context_tokens = max_context_tokens
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._backoff = backoff or Backoff()
        self._extra_body = dict(extra_body or {})
        self._reports_sampled_logprobs = reports_sampled_logprobs
        self._connections = Connections(repr(self), max_concurrency)
        self.retries = 0

    def __repr__(self) -> str:
        return f"OpenAIChatClient({self.base_url!r})"

    @property
    def max_context_tokens(self) -> int | None:
        return self._max_context_tokens

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
        if not ids:
            raise RequestRejectedError("an empty prompt: there is nothing to complete")
        if request.returns.kept_ids or request.returns.prompt_logprobs:
            raise RequestRejectedError(
                "this client returns neither kept ids nor prompt log-probs: ask a LocalChatClient "
                "or a VLLMChatClient"
            )
        body: dict[str, Any] = {"model": request.model}
        if self._prompts == "text" and self._chat_template is not None:
            body["prompt"] = self._chat_template.codec.decode(ids)
        else:
            body["prompt"] = list(ids)
        body |= sampling_body(request.sampling, self._dialect)
        if "max_tokens" not in body:
            body["max_tokens"] = self._room(len(ids))
        if self._dialect == "vllm":
            body["return_token_ids"] = True
            if request.returns.logprobs:
                body["logprobs"] = 1
        body |= request.extensions.get("extra_body_overrides", {})
        return body

    def _room(self, prompt_tokens: int) -> int:
        # A server's own default may be as low as 16 tokens: never leave it to that.
        if self._max_context_tokens is None:
            raise RequestRejectedError(
                "max_tokens is not set and the context length is unknown: set "
                "SamplingConfig.max_tokens, or the client's max_context_tokens"
            )
        room = self._max_context_tokens - prompt_tokens
        if room < 1:
            raise RequestRejectedError(
                f"a prompt of {prompt_tokens} tokens leaves no room in a context of "
                f"{self._max_context_tokens}"
            )
        return room

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float | None) -> Any:
        """The JSON answer, after as many attempts as are allowed and needed."""
        url = f"{self.base_url}/{path}"
        limit = self._timeout_s if timeout_s is None else timeout_s
        body = {k: v for k, v in {**body, **self._extra_body}.items() if v is not None}
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
