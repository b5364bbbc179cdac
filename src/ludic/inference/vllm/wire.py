"""The bodies of vLLM's requests and answers, and what they mean here.

Two routes are used: `/inference/v1/generate`, which takes and returns ids and reports which weights
sampled each token, and `/v1/completions` for servers that lack it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ludic.errors import ConfigError, InferenceError, RequestRejectedError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.http import excerpt
from ludic.inference.openai_client import choice_of, finish_reason, sampling_body
from ludic.types import ChatResponse, TokenTrace, VersionSpan


@dataclass(frozen=True, slots=True)
class VLLMExtensions(Mapping[str, Any]):
    """What to send a vLLM server besides the sampling settings.

    `extra_body_overrides` goes into the request's body last and wins over everything else;
    `max_think_tokens` bounds the thinking of models that have a thinking section. It is a mapping
    of what differs from the defaults: `InferenceSpec(extensions=VLLMExtensions(...))`.
    """

    extra_body_overrides: Mapping[str, Any] = field(default_factory=dict)
    max_think_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_think_tokens is not None and self.max_think_tokens < 0:
            raise ConfigError(
                f"VLLMExtensions.max_think_tokens={self.max_think_tokens}: must be >= 0 or None"
            )

    def __getitem__(self, name: str) -> Any:
        return self.to_mapping()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_mapping())

    def __len__(self) -> int:
        return len(self.to_mapping())

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON data, without what is at its default."""
        overrides = dict(self.extra_body_overrides)
        settings = {"extra_body_overrides": overrides, "max_think_tokens": self.max_think_tokens}
        return {name: value for name, value in settings.items() if value not in ({}, None)}

    @classmethod
    def from_mapping(cls, extensions: Mapping[str, Any]) -> VLLMExtensions:
        """Reads what `to_mapping` wrote; an unknown key is an error."""
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(extensions) - set(names))
        if unknown:
            raise ConfigError(f"unknown vLLM extensions {unknown}; known are {names}")
        return cls(**extensions)


UNNAMED_VERSION = "default"
"""What a server calls the weights that it was started with."""

# Fields of a generate request that are not sampling parameters.
_GENERATE_FIELDS = frozenset(
    {"cache_salt", "priority", "request_id", "model", "kv_transfer_params", "features", "stream"}
)


def generate_body(request: TokenCompletionRequest, room: int, salt: str | None) -> dict[str, Any]:
    """A request to `/inference/v1/generate`."""
    params, overrides = _sampling(request, room)
    body = {
        "model": request.model,
        "token_ids": list(request.prompt_token_ids),
        "sampling_params": params,
        **({} if salt is None else {"cache_salt": salt}),
    }
    for name, value in overrides.items():
        if name == "sampling_params":
            params |= value
        else:
            (body if name in _GENERATE_FIELDS else params)[name] = value
    return body


def completions_body(
    request: TokenCompletionRequest, room: int, salt: str | None
) -> dict[str, Any]:
    """A request to `/v1/completions`."""
    params, overrides = _sampling(request, room)
    return {
        "model": request.model,
        "prompt": list(request.prompt_token_ids),
        "return_token_ids": True,
        **params,
        **({} if salt is None else {"cache_salt": salt}),
        **overrides,
    }


def _sampling(
    request: TokenCompletionRequest, room: int
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Every sampling setting, even those that are off: what is left out, the server would take
    from the model's own generation settings, and the log-probs would be of another policy. Then
    what overrides the body."""
    params = sampling_body(request.sampling, "vllm")
    params["max_tokens"] = min(params.get("max_tokens", room), room)
    if request.returns.logprobs:
        params["logprobs"] = 0  # of the sampled token alone
    if request.returns.prompt_logprobs:
        params["prompt_logprobs"] = 0
    extensions = dict(request.extensions)
    if "ignore_eos" in extensions:  # understood by the in-process engine as well
        params["ignore_eos"] = bool(extensions.pop("ignore_eos"))
    settings = VLLMExtensions.from_mapping(extensions)
    if settings.max_think_tokens is not None:
        params["thinking_token_budget"] = settings.max_think_tokens
    return params, settings.extra_body_overrides


def read_answer(
    answer: Any, request: TokenCompletionRequest, *, version: int, first_version: int, adapter: bool
) -> ChatResponse:
    """The response in an answer of either route.

    `version` is stamped on everything where the server does not say which weights sampled what,
    and where an `adapter` did: the server's own names are then those of the weights below it.
    `first_version` is the number of the weights that the server was started with.
    """
    choice = choice_of(answer)
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise InferenceError(
            "the server's answer has no token ids, so it cannot be trained on: is this a vLLM "
            f"server of 0.26 or newer? It answered {excerpt(choice)}"
        )
    reason = finish_reason(choice)
    info: dict[str, Any] = {}
    if request.returns.prompt_logprobs:
        info["prompt_logprobs"] = _prompt_logprobs(answer, choice, request.prompt_token_ids)
    if isinstance(choice.get("stop_reason"), (int, str)):
        info["stop_reason"] = choice["stop_reason"]
    trace = TokenTrace(
        request.prompt_token_ids,
        tuple(ids),
        _logprobs(choice, ids) if request.returns.logprobs else None,
        _adapter_span(choice.get("weight_versions"), len(ids), version)
        if adapter
        else _spans(choice.get("weight_versions"), len(ids), version, first_version),
        _kept(choice, len(ids)) if request.returns.kept_ids else None,
    )
    text = choice.get("text")
    return ChatResponse(trace, reason, text if isinstance(text, str) else None, info)


def version_number(name: Any, first_version: int) -> int:
    """A version as the server names it, as a number."""
    if name == UNNAMED_VERSION or name is None:
        return first_version
    try:
        return int(name)
    except (TypeError, ValueError):
        raise InferenceError(
            f"the server names its weights {name!r}, which is not one of our versions: another "
            "trainer publishes to it"
        ) from None


def _logprobs(choice: Mapping[str, Any], ids: Sequence[int]) -> tuple[float, ...]:
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        values: Any = [entry.get("logprob") for entry in logprobs["content"] or []]
    else:
        values = logprobs.get("token_logprobs") or []
    if len(values) != len(ids):
        raise InferenceError(
            f"the server returned {len(ids)} token ids and {len(values)} log-probs: they cannot be "
            "matched, so the completion is refused"
        )
    for position, value in enumerate(values):
        # vLLM writes -9999 for what it cannot say, which would pass for a very unlikely token.
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= -9999:
            raise InferenceError(
                f"the log-prob of completion token {position} is {value!r}: are the server's "
                "weights finite?"
            )
    return tuple(map(float, values))


def _prompt_logprobs(
    answer: Mapping[str, Any], choice: Mapping[str, Any], ids: tuple[int, ...]
) -> list[float | None]:
    rows = answer.get("prompt_logprobs") or choice.get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != len(ids):
        got = len(rows) if isinstance(rows, list) else "none"
        raise InferenceError(f"the server returned {got} prompt log-probs for {len(ids)} tokens")
    scores: list[float | None] = [None]
    for position, (row, token) in enumerate(zip(rows[1:], ids[1:], strict=True), start=1):
        entry = (row or {}).get(str(token))
        if entry is None:
            raise InferenceError(f"the server scored prompt token {position} without its own id")
        scores.append(float(entry["logprob"]))
    return scores


def _spans(named: Any, tokens: int, version: int, first_version: int) -> tuple[VersionSpan, ...]:
    if not tokens:
        return ()
    if named is None:
        return (VersionSpan(0, tokens, version),)
    spans = tuple(
        VersionSpan(s["start"], s["end"], version_number(s["version"], first_version))
        for s in named
    )
    covered = [i for s in spans for i in range(s.start, s.end)]
    if covered != list(range(tokens)):
        raise InferenceError(
            f"the server's version spans {excerpt(named)} do not cover {tokens} tokens once each"
        )
    return spans


def _adapter_span(named: Any, tokens: int, version: int) -> tuple[VersionSpan, ...]:
    """One span: a request keeps the adapter that it began with."""
    below = {span.get("version") for span in named or ()}
    if len(below) > 1:
        raise InferenceError(
            f"the weights below the adapter changed while it sampled ({sorted(map(str, below))}): "
            "publish adapters or whole weights to a server, not both"
        )
    return (VersionSpan(0, tokens, version),) if tokens else ()


def _kept(choice: Mapping[str, Any], tokens: int) -> tuple[tuple[int, ...], ...]:
    mask = choice.get("sampling_mask")
    if not isinstance(mask, list) or len(mask) != tokens:
        raise RequestRejectedError(
            "the server did not say which ids truncated sampling kept: start it with "
            "--return-sampling-mask (a GPU, /inference/v1/generate and top_k > 0), or turn "
            "truncation off to train"
        )
    return tuple(tuple(int(i) for i in row) for row in mask)
