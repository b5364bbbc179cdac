"""Which requests cannot be served, said before they are queued."""

from __future__ import annotations

from operator import countOf

from ludic.errors import RequestRejectedError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local.prefix_store import key_of_ids


def checked_prompt(request: TokenCompletionRequest, *, vocab: int, context: int) -> bytes:
    """The prompt's `key_of_ids`. Raises `RequestRejectedError` for what cannot be served by a model
    with so many ids and so long a context."""
    ids = request.prompt_token_ids
    if not ids:
        raise RequestRejectedError("the prompt is empty: give at least one token id")
    if len(ids) >= context:
        raise RequestRejectedError(
            f"a prompt of {len(ids)} tokens leaves no room for a completion within "
            f"max_context_tokens={context}: shorten the prompt, or raise the limit"
        )
    try:
        key = key_of_ids(ids) if countOf(map(type, ids), int) == len(ids) else b""
    except OverflowError:  # a negative id, or one of more than 32 bits
        key = b""
    if not key or max(ids) >= vocab:
        i, token = next(
            (i, t) for i, t in enumerate(ids) if type(t) is not int or not 0 <= t < vocab
        )
        why = (
            f"is outside of the vocabulary (0 to {vocab - 1})"
            if type(token) is int
            else f"is of type {type(token).__name__}: give plain ints, such as .tolist() makes"
        )
        raise RequestRejectedError(f"prompt_token_ids[{i}] = {token!r} {why}")
    return key


def completion_limit(request: TokenCompletionRequest, *, vocab: int, context: int) -> int:
    """How many tokens the completion may have. Raises `RequestRejectedError` for limits that make
    no sense."""
    wanted = request.sampling.max_tokens
    if wanted is not None and wanted < 1:
        raise RequestRejectedError(f"max_tokens={wanted}: must be at least 1")
    if bad := [t for t in request.sampling.stop_token_ids if not 0 <= t < vocab]:
        raise RequestRejectedError(f"stop_token_ids {bad} are outside of the vocabulary")
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise RequestRejectedError(f"timeout_s={request.timeout_s}: must be more than 0")
    room = context - len(request.prompt_token_ids)
    return room if wanted is None else min(room, wanted)
