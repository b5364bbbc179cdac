"""The contract of an inference backend: token ids in, token ids and log-probs out.

A backend implements `ChatClient`. One whose weights change while it serves also implements
`VersionedClient`, and stamps the version on every span of tokens that it returns.

`sync_weights` is the client's half of a publish, and a `PolicyPublisher` the trainer's. For an
engine in this process, the publisher calls `sync_weights`, which takes the weights in. A client of
servers has no tensors to set: its `sync_weights` hands them to the publisher made for it, which
knows how they travel. A client whose weights cannot be changed raises `NotTrainableError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import field

from ludic.errors import PublishError, RequestRejectedError
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.plumbing.records import Record
from ludic.types import ChatResponse


class TokenCompletionRequest(Record, frozen=True):
    """One model call. `conversation_id` keeps a dialogue's calls together, so that a backend can
    reuse what it computed for the earlier ones; `timeout_s` bounds the whole call."""

    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingConfig = SamplingConfig()
    returns: ReturnSpec = ReturnSpec()
    conversation_id: str | None = None
    timeout_s: float | None = None
    extensions: Mapping[str, Any] = field(default_factory=dict)


class ToolRequest(Record, frozen=True):
    """The tools that a model is told about: JSON schemas, in the shape of a chat template."""

    tools: Sequence[Mapping[str, Any]]


@runtime_checkable
class ChatClient(Protocol):
    """A policy that can be asked for tokens. One that sets `keeps_deadlines = True` vouches that no
    call outlasts its `timeout_s`; for any other, agents keep the deadline too."""

    @property
    def max_context_tokens(self) -> int | None:
        """The longest prompt plus completion it takes; None when it does not know."""

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        """Samples one completion.

        The returned trace's prompt is the request's, and its completion holds every sampled id,
        end-of-sequence and stop tokens included. Raises `RequestRejectedError` for a request that
        cannot be served, `DeadlineError` past `timeout_s`, and is safe to cancel.
        """

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        """Makes `params` policy `version`, and returns how, in words. Returns when every token from
        then on is sampled from them; raises `PublishError` where they do not fit or `version` goes
        back, `DeadlineError` past `timeout_s`. A sampler that shares the trainer's module needs no
        tensors: `params` may be empty."""


@runtime_checkable
class VersionedClient(ChatClient, Protocol):
    """A client that knows which policy version it samples from, so that whoever published can check
    that it is the published one."""

    async def get_policy_version(self) -> int: ...


async def policy_version(client: ChatClient) -> int | None:
    """The version that `client` samples from; None for one that keeps no versions."""
    return await client.get_policy_version() if isinstance(client, VersionedClient) else None


async def check_version(client: ChatClient, published: int) -> None:
    """Raises `PublishError` when `client` says that it samples from another version."""
    version = await policy_version(client)
    if version not in (None, published):
        raise PublishError(
            f"version {published} was published to {client!r}, which says that it samples from "
            f"{version}: does its sync_weights take the version in?"
        )


def completion_room(prompt: Sequence[int], limit: int | None, setting: str) -> int | None:
    """How many tokens may follow `prompt` in a context of `limit`; None: nobody knows. Raises
    `RequestRejectedError` for an empty prompt, and for one that fills what `setting` allows."""
    if not prompt:
        raise RequestRejectedError("the prompt is empty: give at least one token id")
    if limit is not None and len(prompt) >= limit:
        raise RequestRejectedError(
            f"a prompt of {len(prompt)} tokens leaves no room for a completion within "
            f"{setting}={limit}: shorten the prompt, or raise the limit"
        )
    return None if limit is None else limit - len(prompt)


class Waiter(Protocol):
    """Whoever waits for an answer in an event loop: a future, or what takes its place."""

    def get_loop(self) -> asyncio.AbstractEventLoop: ...
    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: Any, /) -> None: ...


@runtime_checkable
class QueueingClient(ChatClient, Protocol):
    """A client that queues a request without a coroutine to wait for it. The caller keeps the
    deadline."""

    def try_submit(self, request: TokenCompletionRequest, waiter: Waiter) -> Any:
        """Returns what `withdraw` takes, or None, with nothing queued, if there is no room."""

    def withdraw(self, ticket: Any) -> None:
        """Cancels a request; its waiter gets no answer."""
