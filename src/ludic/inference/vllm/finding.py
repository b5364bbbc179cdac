"""A vLLM server that is already running on this machine, or at a given address."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass

from ludic.errors import InferenceError

DEFAULT_PORT = 8000
"""Where vLLM listens unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server, the name under which it serves its model, and where it has the model from."""

    url: str
    name: str
    model: str


def find_server(
    model: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    timeout_s: float = 5.0,
) -> FoundServer | None:
    """The server at `port`, which must then be there and serve `model`. Without a port, the one at
    vLLM's own, if there is one that serves `model`. Without a model, any will do."""
    url = f"http://{host}:{port or DEFAULT_PORT}"
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=timeout_s) as answer:
            served = [
                FoundServer(url, str(row["id"]), str(row.get("root") or row["id"]))
                for row in json.load(answer)["data"]
            ]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        if port is None:
            return None
        raise InferenceError(
            f"no vLLM server answers at {url} ({exc}): start one with `ludic serve MODEL --port "
            f"{port}`, or name another port"
        ) from exc
    fitting = [found for found in served if model in (None, found.name, found.model)]
    if fitting:
        return fitting[0]
    if port is None:
        return None
    raise InferenceError(
        f"the server at {url} serves {[found.name for found in served]}, not {model!r}: name its "
        "model, or another port"
    )
