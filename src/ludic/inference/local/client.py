"""`LocalChatClient`: the backend that runs in the process, over any Hugging Face causal LM."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import nn

from ludic.errors import ConfigError, DeadlineError, PublishError, QueueFullError
from ludic.inference.client import TokenCompletionRequest, Waiter
from ludic.inference.local.admission import QueueGate, checked_request
from ludic.inference.local.build import build_scheduler
from ludic.inference.local.copies import Shadow
from ludic.inference.local.engine_thread import EngineThread, Pause, call_in
from ludic.inference.local.sequence import Sequence
from ludic.inference.local.view import check_adapters
from ludic.inference.retries import within
from ludic.plumbing.model_parts import active_dropout, base_causal_lm, may_drop
from ludic.plumbing.precision import Precision, check_precision, float32_products
from ludic.seeding import noise_key
from ludic.types import ChatResponse
from ludic.workers.deadlines import deadline

_held: ContextVar[tuple[object, ...]] = ContextVar("ludic_held", default=())
"""The updates that this task holds, or was started in. A task inherits a copy of its parent's
context: so a task started inside `updating()` counts as a holder, and one started elsewhere does
not, even where both run in one thread."""


class LocalChatClient:
    """Samples from `model` itself: no server, and no copy of the weights (but see `precision`).

    Requests from any number of coroutines, in any number of event loops, are batched continuously
    in the engine's thread. In deterministic mode (the default on the CPU) tokens and log-probs are
    the same bits at any concurrency, for one number of threads. Use it as an async context manager,
    or call `close()`.

    Args:
        model: the trainer's module, or any other causal LM, PEFT-wrapped or not. It is never put
            into another mode, configured or copied.
        tokenizer: decodes completions, and knows the end-of-sequence token.
        max_slots: how many sequences are computed together.
        max_context_tokens: prompt plus completion; None: what the model takes (on a GPU at most
            4,096, since its slots are allocated at once).
        deterministic: None: on the CPU.
        step_rows: tokens per step in deterministic mode; None: a few sizes that give the same bits
            on this machine, tried when the client is made.
        prefix_cache_tokens: how many tokens of ended sequences are kept; None: 256 MB worth of
            them on the CPU, 4 GB on a GPU. 0 turns the cache off.
        max_queue: how many requests wait inside; `on_full` decides what happens to the next one.
        on_update: what happens to requests in flight when the weights change: they "finish" under
            the old ones first, or "continue" under the new ones, with a version span of their own.
        request_timeout_s: the deadline of a request without one.
        version: the policy version of the current weights.
        precision: the precision that the trainer computes in; None: the weights' type,
            with torch's switches as they are. With "mixed", requests are sampled from a bfloat16
            copy of the float32 weights, which is renewed at the end of each `updating()`.
        pipelined: whether the host stays steps behind the device, with CUDA graphs where there
            are any; None: on a GPU, unless deterministic.
    """

    keeps_deadlines = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_slots: int = 64,
        max_context_tokens: int | None = None,
        deterministic: bool | None = None,
        step_rows: int | None = None,
        prefix_cache_tokens: int | None = None,
        max_queue: int = 1024,
        on_full: Literal["wait", "raise"] = "wait",
        on_update: Literal["finish", "continue"] = "finish",
        request_timeout_s: float = 600.0,
        version: int = 0,
        precision: Precision | None = None,
        pipelined: bool | None = None,
    ) -> None:
        for name, value, choices in (
            ("on_full", on_full, ("wait", "raise")),
            ("on_update", on_update, ("finish", "continue")),
        ):
            if value not in choices:
                raise ConfigError(f"LocalChatClient: {name}={value!r}; must be one of {choices}")
        if max_queue < 1 or max_slots < 1:
            raise ConfigError(f"max_slots={max_slots}, max_queue={max_queue}: both must be >= 1")
        check_adapters(model)
        check_precision(precision, model, "LocalChatClient")
        self._model = base_causal_lm(model)
        self._sampled = frozenset(map(id, self._model.parameters()))
        self._shadow = Shadow(self._model) if precision == "mixed" else None
        with float32_products(precision):
            self._scheduler = build_scheduler(
                self._shadow.model if self._shadow is not None else self._model,
                # The engine decodes in its own thread; a fast tokenizer is not safe to share.
                copy.deepcopy(tokenizer),
                max_slots=max_slots,
                max_context_tokens=max_context_tokens,
                deterministic=deterministic,
                step_rows=step_rows,
                prefix_cache_tokens=prefix_cache_tokens,
                pipelined=pipelined,
                version=version,
            )
        self._vocab = int(self._model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        self._eos = eos_ids(self._model, tokenizer)
        self._may_drop = may_drop(self._model)
        self._on_update, self._on_full = on_update, on_full
        self._timeout_s = request_timeout_s
        self._holder: object | None = None
        self._gate = QueueGate(max_queue)
        self._thread = EngineThread(self._scheduler, self._gate, precision)

    # Life

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, *, timeout_s: float = 30.0) -> None:
        """Ends the engine; requests in flight and in the queue get `EngineClosedError`."""
        self._thread.close()
        ended = await asyncio.to_thread(self._thread.join, timeout_s)
        if not ended:
            raise DeadlineError("the engine's thread to end", "LocalChatClient.close", timeout_s)

    # The client contract

    @property
    def max_context_tokens(self) -> int:
        """The longest prompt plus completion."""
        return self._scheduler.memory.max_tokens

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        """Samples one completion; see `ChatClient`. Prompt log-probs, when asked for, are in
        `info["prompt_logprobs"]` (None first), at the request's temperature."""
        timeout_s = request.timeout_s if request.timeout_s is not None else self._timeout_s
        loop, left_s = asyncio.get_running_loop(), timeout_s
        future: asyncio.Future[ChatResponse] = loop.create_future()
        sequence = self.try_submit(request, future)
        if sequence is None:
            ends_at = loop.time() + timeout_s
            if self._on_full == "raise":
                raise QueueFullError(
                    f"{self._gate.places} requests wait already (max_queue): ask again later, or "
                    'set on_full="wait"'
                )
            async with within(timeout_s, "a place in the queue", "the in-process engine"):
                await self._gate.enter()
            left_s = max(0.0, ends_at - loop.time())
            sequence = self._submit(request, future)
        try:
            with deadline(left_s):
                return await future
        except TimeoutError:
            self._thread.cancel(sequence)
            raise DeadlineError("a completion", "the in-process engine", timeout_s) from None
        except asyncio.CancelledError:
            self._thread.cancel(sequence)
            raise

    def try_submit(self, request: TokenCompletionRequest, waiter: Waiter) -> Sequence | None:
        """Queues a request without a coroutine to wait for it: `waiter` gets the answer in its
        event loop. Returns what `withdraw` takes; None, with nothing queued, if the queue is full.
        There is no deadline but the caller's."""
        if self._gate.try_enter():
            return self._submit(request, waiter)
        self._check(request)  # so that no request waits in order to be refused
        return None

    def withdraw(self, sequence: Sequence) -> None:
        """Cancels a request; its waiter gets no answer."""
        self._thread.cancel(sequence)

    async def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float | None = None, version: int
    ) -> str:
        """Makes `params` policy `version`. Tensors that are the module's own cost nothing; others
        are copied into it, all or none. Whoever holds `updating()` may call it inside, also in
        tasks started there; anybody else waits for their turn. Without any, the weights are named
        as they are, and nothing is held up for that unless there is a copy of them to renew."""
        self._foreign(params)  # what does not fit is refused before anybody waits
        self._thread.check_version(version)
        current = self._shadow is None or self._shadow.is_current
        if self._holder in _held.get() or (not params and self._holder is None and current):
            return self._take_weights(params, version)
        if self._scheduler.memory.shape.device.type == "cuda":
            params = await asyncio.to_thread(_pinned, params)  # requests go on meanwhile
        async with self.updating(timeout_s=timeout_s):
            return self._take_weights(params, version)

    async def get_policy_version(self) -> int:
        """The version of the weights that the next token is sampled from."""
        return self._thread.version

    # Weights

    def samples_from(self, model: nn.Module) -> bool:
        """Whether all that is trained of `model` is in what this was made with: no copy of it, and
        no adapter that was put into it later."""
        return all(id(p) in self._sampled for p in model.parameters() if p.requires_grad)

    def set_version(self, version: int) -> None:
        """Names the weights as they are now; raises `PublishError` for a version that goes back.

        Call it inside `updating()`, so that no token is sampled under the wrong name.
        """
        self._thread.set_version(version)

    @asynccontextmanager
    async def updating(
        self, *, version: int | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[None]:
        """Held while the weights change in place: nothing is sampled meanwhile.

        With `on_update="finish"` it first waits for the requests in flight. Afterwards every
        cached key is forgotten, and requests that go on compute their tokens again. `version`
        names the new weights on the way out.
        """
        seconds = timeout_s if timeout_s is not None else self._timeout_s
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def on_ready(error: BaseException | None) -> None:
            call_in(loop, [(ready, error)])

        pause = Pause(self._on_update == "finish", on_ready)
        self._thread.pause(pause)
        try:
            what = "requests in flight to end before an update"
            async with within(seconds, what, "LocalChatClient"):
                await ready
            # One holder at a time: the engine grants the next pause after this one's release, and
            # `_holder` is None again by then.
            self._holder = held = object()
            _held.set((*_held.get(), held))
            try:
                yield
                if version is not None:
                    self._thread.set_version(version)
            finally:
                self._holder = None
                _held.set(tuple(h for h in _held.get() if h is not held))
                if self._shadow is not None:
                    self._shadow.refresh()
                device = self._scheduler.memory.shape.device
                if device.type == "cuda":
                    # The optimizer's kernels run in this thread's stream, the engine's in another.
                    torch.cuda.current_stream(device).synchronize()
        finally:
            self._thread.release(pause)

    def stats(self) -> dict[str, float]:
        """Totals and rates since the start, and what is here now."""
        s = self._scheduler
        return {
            **s.counters.as_stats(s.memory.max_slots),
            "running": len(s.running),
            "waiting": self._gate.taken,
            "slots_taken": s.memory.taken,
            "kv_bytes": s.memory.bytes,
            "cached_tokens": s.store.tokens,
            "version": self._thread.version,
        }

    # Inside

    def _submit(self, request: TokenCompletionRequest, waiter: Waiter) -> Sequence:
        """Queues a request that has a place in the gate."""
        try:
            limit, prompt_key = self._check(request)
            sampling = request.sampling
            seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
            stop_ids = frozenset() if request.extensions.get("ignore_eos") else self._eos
            if sampling.stop_token_ids:
                stop_ids = stop_ids.union(sampling.stop_token_ids)
            sequence = Sequence(
                prompt_token_ids=request.prompt_token_ids,
                prompt_key=prompt_key,
                limit=limit,
                sampling=sampling,
                returns=request.returns,
                key=noise_key(seed),
                stop_ids=stop_ids,
                deliver=partial(self._thread.outbox.put, waiter),
                seed=seed,
            )
            self._thread.submit(sequence)
        except BaseException:
            self._gate.leave()
            raise
        return sequence

    def _check(self, request: TokenCompletionRequest) -> tuple[int, bytes]:
        """How many tokens the completion may have, and the prompt's key; raises for what cannot be
        served."""
        if self._thread.closed:
            raise self._thread.closed_error()
        if self._may_drop and (active := active_dropout(self._model)):
            raise ConfigError(f"dropout is active in {active}: call model.eval(), or set it to 0")
        return checked_request(request, vocab=self._vocab, context=self.max_context_tokens)

    def _foreign(self, params: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Those of `params` that are not the module's own tensors, all checked to fit, each with
        the tensor that it is to be copied into."""
        if not params:
            return []
        own: dict[str, torch.Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        own.update(self._model.named_buffers(remove_duplicate=False))
        foreign = []
        for name, tensor in params.items():
            mine = own.get(name)
            if mine is None:
                raise PublishError(f"sync_weights: the model has no parameter {name!r}")
            if not isinstance(tensor, torch.Tensor):
                raise PublishError(
                    f"sync_weights: {name!r} is of type {type(tensor).__name__}: give a tensor, "
                    "such as torch.as_tensor makes"
                )
            if mine.shape != tensor.shape:
                raise PublishError(
                    f"sync_weights: {name!r} has shape {tuple(tensor.shape)}, the model's has "
                    f"{tuple(mine.shape)}"
                )
            if mine.data_ptr() != tensor.data_ptr():
                foreign.append((mine, tensor))
        return foreign

    def _take_weights(self, params: Mapping[str, Any], version: int) -> str:
        # Both again: a newer version, or other tensors, may have come while this one waited.
        self._thread.check_version(version)
        foreign = self._foreign(params)
        with torch.no_grad():
            for mine, tensor in foreign:
                # Pinned ones all at once: `updating` waits for them at its end.
                mine.copy_(tensor, non_blocking=mine.is_cuda and tensor.is_pinned())
        self._thread.set_version(version)
        return f"copied {len(foreign)} tensors" if foreign else "shared: nothing to copy"


def _pinned(params: Mapping[str, Any]) -> dict[str, Any]:
    """Weights in the host's memory copied to where a GPU fetches them by itself, many times as fast
    as from a file that is mapped. Others, and those for which there is no such memory, stay as they
    are. The allocator keeps the memory for the next time."""
    pinned = dict(params)
    with suppress(RuntimeError):
        for name, tensor in params.items():
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                pinned[name] = tensor.pin_memory()
    return pinned


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids, as the tokenizer and the model's generation settings name them."""
    ids: set[Any] = set()
    for source in (tokenizer, getattr(model, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(ids - {None})
