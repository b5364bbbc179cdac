"""The vLLM servers of a client: what each can do, and how it fares."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ludic.errors import ConfigError, EngineClosedError, InferenceError, RequestRejectedError
from ludic.inference.http import UnreachableError
from ludic.inference.vllm.switching import SWITCH


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server said about itself."""

    vllm_version: str
    models: tuple[str, ...]
    max_model_len: int | None
    generates: bool
    """It has `/inference/v1/generate`, and says which weights sampled each token."""
    updates: bool
    """It has the routes of a live weight update."""
    names_versions: bool
    """It keeps the name of its weights (`/weight_info`)."""
    loads_adapters: bool = False
    """It takes LoRA adapters while it serves (`/v1/load_lora_adapter`)."""
    switches: bool = False
    """It goes over to staged weights by itself (`ludic.inference.vllm.switching`)."""


@dataclass(eq=False)
class Serving:
    """What requests are sampled from: a server's own weights, or an adapter on top of them."""

    adapter: str | None = None
    """The name that requests give for it; None: the server's own weights."""
    version: int = 0
    """The adapter's version."""
    requests: int = 0
    """How many are running."""


@dataclass(eq=False)
class Replica:
    """One server's address and state. `version` is what it was last brought to by this process."""

    url: str
    facts: ServerFacts | None = None
    version: int = 0
    serving: Serving = field(default_factory=Serving)
    """What new requests are sampled from."""
    in_flight: int = 0
    served: int = 0
    retry_at: float = 0.0
    failures: int = 0
    out: str | None = None
    """Why it is out of rotation; None while it serves."""
    lost: str | None = None
    """How it was unreachable since its weights were last checked; None: it was not."""
    instance: str = ""
    """Which start of the server this is, where its registration says so."""

    def mark_down(self, cause: str, pause_s: float) -> None:
        """Notes that the server did not answer; it is asked again after a pause."""
        self.failures += 1
        self.lost = cause
        self.retry_at = time.monotonic() + pause_s

    def mark_up(self) -> None:
        self.failures, self.lost = 0, None

    def describe(self) -> str:
        if self.out is not None:
            return f"{self.url}: out of rotation ({self.out})"
        if self.lost is not None:
            return f"{self.url}: down ({self.lost})"
        return f"{self.url}: up, {self.in_flight} requests"


async def server_facts(url: str, ask: Callable[..., Awaitable[Any]]) -> ServerFacts:
    """Asks the server at `url` what it is and what it can; `ask` is called with a method and a
    path. Raises `ConfigError` for one that is not vLLM."""

    async def generates() -> bool:
        """Without --enable-scale-out the route refuses everything; with it, an empty body."""
        try:
            await ask("POST", "/inference/v1/generate", body={})
        except RequestRejectedError as exc:
            return "HTTP 403" not in str(exc)
        return True

    async def switches() -> bool:
        try:
            await ask("GET", SWITCH)
        except (InferenceError, ValueError):
            return False
        return True

    try:
        served = await ask("GET", "/v1/models")
        version = (await ask("GET", "/version")).get("version", "unknown")
        paths = set((await ask("GET", "/openapi.json")).get("paths", {}))
        models = tuple(str(m["id"]) for m in served["data"])
    except (UnreachableError, EngineClosedError):
        raise
    except (InferenceError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(
            f"{url} does not answer like a vLLM server ({exc}): is the address right? Start one "
            "with `python -m ludic.inference.vllm_server --model …`"
        ) from exc
    lengths = [m.get("max_model_len") for m in served["data"] if m.get("max_model_len")]
    names_versions = "/weight_info" in paths
    return ServerFacts(
        vllm_version=str(version),
        models=models,
        max_model_len=min(lengths, default=None),
        # Older servers have the route too, but say nothing of versions and are slower there.
        generates=names_versions and "/inference/v1/generate" in paths and await generates(),
        updates="/start_weight_update" in paths,
        names_versions=names_versions,
        loads_adapters="/v1/load_lora_adapter" in paths,
        switches=await switches(),
    )


class WeightKeeper(Protocol):
    """Who keeps the servers' weights: a publisher, which tells its client of itself."""

    async def publish(self, weights: Mapping[str, Any], version: int) -> object:
        """Brings these weights to every server."""

    async def restore(self, replica: Replica) -> bool:
        """Brings a server that was away up to date; False: that takes a publish."""
