"""A stand-in for a vLLM server that takes adapters: it reads the folders as vLLM would."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.torch import load_file

from ludic.distributed.vllm.checksums import checksums
from tests.inference.vllm.fake_server import ROUTES, FakeVLLM

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
STOCK = ("/v1/models", "/version", "/openapi.json", "/health", "/v1/completions", LOAD, UNLOAD)


@dataclass
class FakeLoRA(FakeVLLM):
    """Holds adapters by name, and counts how many it ever held at once."""

    routes: tuple[str, ...] = (*ROUTES, LOAD, UNLOAD)
    max_rank: int = 8
    max_loras: int = 2
    adapters: dict[str, Path] = field(default_factory=dict)
    newest: dict[str, list[Any]] = field(default_factory=dict)
    most: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.faults or request.path not in self.routes:
            return await super().answer(request)
        self.calls[request.path] += 1
        body = await request.json() if request.can_read_body else None
        return self.reply(request.path, body)

    def reply(self, path: str, body: Any) -> web.Response:
        if path in (LOAD, UNLOAD):
            return self._change(path, body)
        if (body or {}).get("model", "tiny") not in ("tiny", *self.adapters):
            return web.json_response({"error": f"{body['model']} does not exist"}, status=404)
        return web.json_response(self._reply(path, body))

    def _change(self, path: str, body: Any) -> web.Response:
        name = body["lora_name"]
        if (name in self.adapters) == (path == LOAD):
            return web.json_response({"error": f"{name} is loaded, or is not"}, status=400)
        if path == UNLOAD:
            del self.adapters[name]
            return web.Response(text="Success")
        folder = Path(body["lora_path"])
        if not folder.is_dir():
            return web.json_response({"error": f"No adapter found for {folder}"}, status=404)
        if json.loads((folder / "adapter_config.json").read_text())["r"] > self.max_rank:
            return web.json_response({"error": "greater than max_lora_rank"}, status=500)
        tensors = load_file(folder / "adapter_model.safetensors")
        sums = checksums(tensors.items())
        self.newest = {
            n.removeprefix("base_model.model.").removesuffix(".weight"): [
                str(sums[n]),
                str(t.dtype).split(".")[-1],
                list(t.shape),
            ]
            for n, t in tensors.items()
        }
        self.adapters[name] = folder
        self.most = max(self.most, len(self.adapters))
        return web.Response(text="Success")

    def _reply(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            base = {"id": "tiny", "max_model_len": 128, "parent": None, "root": "tiny"}
            cards = [
                {"id": name, "root": str(folder), "parent": "tiny"}
                for name, folder in self.adapters.items()
            ]
            return {"data": [base, *cards]}
        if path == "/collective_rpc" and body["method"] == "ludic_adapter_limits":
            limits = {"max_rank": self.max_rank, "max_loras": self.max_loras}
            return {"results": [{"enabled": self.max_rank > 0, **limits}]}
        if path == "/collective_rpc" and body["method"] == "ludic_adapter_receipt":
            return {"results": [{"tensors": self.newest, "active": True, "held": 1}]}
        return super()._reply(path, body)
