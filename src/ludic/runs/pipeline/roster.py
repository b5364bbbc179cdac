"""The servers that have registered with a run, as its trainer and its actors use them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ludic.errors import ConfigError, PipelineError
from ludic.inference import VLLMChatClient
from ludic.pipeline.servers import RENEW_S, RegisteredServer, list_servers, wait_for_servers
from ludic.pipeline.store import Store
from ludic.runs.pipeline.address import (
    FILE,
    URL_VARIABLE,
    find_pipeline,
    key_of_servers,
    section_of,
    starts_redis,
)
from ludic.runs.results.terminal import say, warn
from ludic.runs.settings import RunConfig
from ludic.training.batching.source import PolicyLostError

JOINING = "it has registered since the last publish, and the next one brings it the weights"
WITHOUT_WEIGHTS_S = 15.0
"""How long no server may have the newest weights. One that has just got them says so seconds
later."""


class Roster:
    """Reads a run's list of servers, and has a client use it. `published`: only those that have had
    weights from a trainer, for those who bring them none."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path | None,
        *,
        url: str | None = None,
        published: bool = False,
    ) -> None:
        address_known = url is not None or (folder is not None and (folder / FILE).is_file())
        if starts_redis(section_of(config)) and not address_known:
            raise ConfigError(
                'inference.servers = "registered": servers register in a Redis that is there '
                f"before the run; name it in pipeline.url or {URL_VARIABLE}"
            )
        self._store = Store(find_pipeline(config, folder, url))
        self.key = key_of_servers(config, folder)[1]
        self._published = published

    def close(self) -> None:
        self._store.close()

    async def wait(self, timeout_s: float) -> list[str]:
        """Returns the addresses as soon as there is one."""
        servers = await wait_for_servers(self._store, timeout_s, published=self._published)
        return [server.url for server in servers]

    async def update(self, client: VLLMChatClient) -> bool:
        """Has `client` use the servers that are there now; a Redis that does not answer changes
        nothing. Returns whether any came or left."""
        try:
            listed = await asyncio.to_thread(list_servers, self._store, patience_s=RENEW_S)
        except PipelineError as exc:
            warn(f"the list of servers stays as it is: {exc}")
            return False
        servers = [s for s in listed if s.version is not None or not self._published]
        before = client.replicas
        changed = client.set_servers(
            {server.url: server.instance for server in servers},
            joining=None if self._published else JOINING,
        )
        if changed and (news := _news({r.url for r in before}, servers)):
            say(f"servers: {news}")
        return changed

    async def follow(self, client: VLLMChatClient) -> None:
        """Keeps `client` up to date until it is cancelled."""
        while True:
            await asyncio.sleep(RENEW_S / 2)
            await self.update(client)


class ServerWatch:
    """Notices, for the trainer, that no registered server has its policy. All were started again
    since the last publish: the next would come after a batch, and no batch comes from them."""

    def __init__(self, store: Store, patience_s: float = WITHOUT_WEIGHTS_S) -> None:
        self._store, self._patience_s = store, patience_s
        self._since: float | None = None
        self._state = ""

    async def look(self, version: int | None, *, publishing: bool) -> None:
        """Reads the list. `publishing`: weights are on their way, so it does not count."""
        try:
            servers = await asyncio.to_thread(list_servers, self._store, patience_s=RENEW_S)
        except PipelineError:  # which others report
            servers = []
        if publishing or not servers or any(s.version == version for s in servers):
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        states = ", ".join(f"{s.url} {'none' if s.version is None else s.version}" for s in servers)
        self._state = f"no server has version {version} of the weights ({states})"

    def check(self) -> None:
        """Raises if it has been so for too long; then the time begins anew."""
        if self._since is not None and time.monotonic() - self._since > self._patience_s:
            self._since = None
            raise PolicyLostError(self._state)


def _news(before: set[str], servers: list[RegisteredServer]) -> str:
    now = {server.url for server in servers}
    came = [f"{url} has come" for url in sorted(now - before)]
    return ", ".join([*came, *(f"{url} has left" for url in sorted(before - now))])
