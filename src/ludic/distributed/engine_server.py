"""The in-process engine behind HTTP, with those routes of vLLM that our client and publisher use.

It is for machines without vLLM, and for tests of whole clusters. It samples with the same engine
as a run with `inference.backend = "local"`. An update is staged, checked and applied as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web
from torch import Tensor, nn

from ludic.distributed.vllm.checksums import receipt
from ludic.distributed.vllm.placement import Place
from ludic.distributed.vllm.planes import BroadcastGroup
from ludic.distributed.vllm.shared_memory import FetchedWeights, open_shared
from ludic.errors import DeadlineError, EngineClosedError, LudicError, PublishError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.local.client import LocalChatClient
from ludic.inference.sampling import ReturnSpec, SamplingConfig
from ludic.inference.vllm.flags import FETCH, PLACE, RECEIPT, STAGE
from ludic.inference.vllm.guard import OPEN, has_key
from ludic.inference.vllm.wire import UNNAMED_VERSION
from ludic.plumbing.model_parts import base_causal_lm
from ludic.types import ChatResponse

_SAMPLING = frozenset(SamplingConfig.__struct_fields__)
_LARGEST_BODY = 64 * 1024 * 1024


class EngineServer:
    """Serves `client`, which samples from `model`, under the name `name`; with a `key`, to those
    who have it. It passes weights on to other machines from the address `pass_on`, if any. The
    engine counts updates, and `_names` has the trainer's names for them: those of a resumed run may
    go back. All of it happens in one event loop, tensors in threads."""

    def __init__(
        self,
        client: LocalChatClient,
        model: nn.Module,
        tokenizer: Any,
        *,
        name: str,
        key: str | None = None,
        pass_on: str | None = None,
    ) -> None:
        self._client, self._model, self._tokenizer = client, base_causal_lm(model), tokenizer
        self._name, self._key = name, key
        self._names, self._applied = [UNNAMED_VERSION], 0
        self._staged: dict[str, Tensor] = {}
        self._group: BroadcastGroup | None = None
        self._fetched = FetchedWeights(pass_on)
        posts: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "/inference/v1/generate": self._generate,
            "/tokenize": self._tokenize,
            "/collective_rpc": self._call,
            "/init_weight_transfer_engine": self._join,
            "/finish_weight_update": self._apply,
            # An update pauses the engine by itself, and forgets what it had computed.
            **dict.fromkeys(("/pause", "/resume", "/reset_prefix_cache"), _nothing),
        }
        gets: dict[str, Callable[[], Any]] = {
            OPEN: dict,
            "/version": lambda: {"version": "ludic"},
            "/v1/models": lambda: {"data": [self._card()]},
            "/openapi.json": lambda: {"paths": {path: {} for path in (*gets, *posts)}},
            "/weight_info": lambda: {"weight_version": self._names[self._applied]},
            "/get_world_size": lambda: {"world_size": 1},
        }
        self.app = web.Application(middlewares=[self._guarded], client_max_size=_LARGEST_BODY)
        for path, answer in gets.items():
            self.app.router.add_get(path, _answering(answer))
        for path, work in posts.items():
            self.app.router.add_post(path, _working(work))

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        authorization = request.headers.get("Authorization", "")
        if self._key is not None and request.path != OPEN and not has_key(self._key, authorization):
            return _refusal(401, "this server wants the key of its run")
        try:
            response: web.StreamResponse = await handler(request)
            return response
        except DeadlineError as exc:
            return _refusal(504, exc)
        except EngineClosedError as exc:
            return _refusal(503, exc)
        except (LudicError, ValueError, KeyError, TypeError) as exc:
            return _refusal(400, exc)

    # Sampling

    def _card(self) -> dict[str, Any]:
        return {"id": self._name, "max_model_len": self._client.max_context_tokens}

    async def _tokenize(self, body: Any) -> Any:
        special = bool(body.get("add_special_tokens", True))
        return {"tokens": list(self._tokenizer.encode(body["prompt"], add_special_tokens=special))}

    async def _generate(self, body: Any) -> Any:
        params = dict(body["sampling_params"])
        returns = ReturnSpec(
            logprobs=params.pop("logprobs", None) is not None,
            prompt_logprobs=params.pop("prompt_logprobs", None) is not None,
        )
        params.pop("include_stop_str_in_output", None)  # they always stay
        extensions = {"ignore_eos": True} if params.pop("ignore_eos", False) else {}
        if unknown := sorted(params.keys() - _SAMPLING):
            raise ValueError(f"this server has no sampling parameters {unknown}")
        params |= {name: tuple(params.get(name, ())) for name in ("stop", "stop_token_ids")}
        sampling = SamplingConfig(**params)
        if returns.prompt_logprobs and sampling.temperature != 1:
            raise ValueError("prompt log-probs are those at temperature 1, as vLLM's")
        response = await self._client.complete_tokens(
            TokenCompletionRequest(
                *(self._name, tuple(body["token_ids"]), sampling, returns), extensions=extensions
            )
        )
        return self._answer(response)

    def _answer(self, response: ChatResponse) -> Any:
        trace = response.trace
        assert trace is not None
        scores = response.info.get("prompt_logprobs")
        rows = zip(trace.prompt_token_ids, scores or (), strict=False)
        choice = {
            "index": 0,
            "finish_reason": response.finish_reason.value,
            "token_ids": list(trace.completion_token_ids),
            "logprobs": {"content": [{"logprob": x} for x in trace.completion_logprobs or ()]},
            "weight_versions": [
                {"start": s.start, "end": s.end, "version": self._names[s.version]}
                for s in trace.version_spans
            ],
        }
        prompt = [None if x is None else {str(i): {"logprob": x}} for i, x in rows]
        return {"choices": [choice], "prompt_logprobs": prompt or None}

    # Weights

    async def _call(self, body: Any) -> Any:
        if body["method"] == PLACE:
            return {"results": [asdict(Place.of(next(self._model.parameters()).device))]}
        if body["method"] == FETCH:  # with the update: it samples while a thread takes that in
            return {"results": [{"fetched": True}]}
        if body["method"] == STAGE:
            await self._stage(body["args"][0])
        elif body["method"] != RECEIPT:
            raise ValueError(f"this server's worker has no method {body['method']!r}")
        tensors = await asyncio.to_thread(receipt, self._staged.items())
        return {"results": [{"tensors": tensors, "applied": self._applied}]}

    async def _join(self, body: Any) -> Any:
        invitation = dict(body["init_info"])
        rank = invitation.pop("rank_offset")
        if self._group is not None:
            self._group.close()
        self._group = await asyncio.to_thread(BroadcastGroup, **invitation, rank=rank)

    async def _stage(self, update: Any) -> None:
        self._staged = {}
        self._fetched.drop()
        if update is None:
            return
        tensors = await asyncio.to_thread(lambda: dict(self._arriving(update)))
        wanted = {name for name, _ in self._model.named_parameters()}
        if missing := sorted(wanted - tensors.keys()):
            raise PublishError(f"{len(missing)} tensors were left out, such as {missing[:3]}")
        self._staged = tensors

    def _arriving(self, update: Any) -> Iterator[tuple[str, Tensor]]:
        plane = update["plane"]
        if plane == "shared_memory":
            yield from open_shared(Path(update["path"]))
        elif plane == "http":
            yield from open_shared(self._fetched.fetch(update["source"]))
        elif plane == "broadcast" and self._group is not None:
            yield from self._group.receive(update["tensors"])
        else:
            raise PublishError(f"this server takes no weights over {plane!r}")

    async def _apply(self, body: Any) -> Any:
        staged, self._staged = self._staged, {}
        self._fetched.drop()
        if staged:
            # Named first: a request may end before `sync_weights` returns.
            name = str((body or {}).get("weight_version", UNNAMED_VERSION))
            self._names[self._applied + 1 :] = [name]
            await self._client.sync_weights(staged, version=self._applied + 1)
            self._applied += 1


async def _nothing(_: Any) -> Any:
    return None


def _answering(answer: Callable[[], Any]) -> Any:
    async def handle(_: web.Request) -> web.Response:
        return web.json_response(answer())

    return handle


def _working(work: Callable[[Any], Awaitable[Any]]) -> Any:
    async def handle(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        return web.json_response(await work(body) or {})

    return handle


def _refusal(status: int, why: object) -> web.Response:
    return web.json_response({"error": {"message": str(why)}}, status=status)
