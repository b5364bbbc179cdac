"""Brings an actor to the policies that the trainer announces, while its units go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from ludic.distributed.piece_fetcher import NotComingError
from ludic.errors import PipelineError, PublishError
from ludic.inference.client import ChatClient
from ludic.pipeline.messages import Unit
from ludic.pipeline.policies import StoredPolicy, load_policy
from ludic.pipeline.store import Store
from ludic.pipeline.weights_fetcher import PolicyFetcher

_log = logging.getLogger("ludic.pipeline")

_LOOK_S = 0.02
_REMEMBERED = 1000


class PolicyFollower:
    """Has the client's weights follow the run's policies. One policy is on its way at a time, in a
    task of its own: units that an older one is enough for are taken, sampled and sent meanwhile.

    It belongs to the actor's event loop; other threads may read `newest`. Without a `client` the
    weights are somebody else's concern, and policies are only noted. Files that this host cannot
    open are fetched, and passed on from `address`. A unit waits `policy_s` at most.
    """

    def __init__(
        self, store: Store, client: ChatClient | None, address: str, policy_s: float
    ) -> None:
        self.waiting = 0  # units that wait for a policy
        self.loaded_s = 0.0  # how long the newest took to load
        self._store, self._client, self._policy_s = store, client, policy_s
        self._address = address
        self._seen: list[StoredPolicy] = []
        self._loading: StoredPolicy | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._fetcher: PolicyFetcher | None = None
        self._arriving: asyncio.Task[StoredPolicy] | None = None
        self._heard_at: float | None = None  # of the one that is fetched

    @property
    def newest(self) -> StoredPolicy | None:
        """The policy that the client has."""
        seen = self._seen
        return seen[-1] if seen else None

    def since(self, serial: int) -> list[StoredPolicy]:
        """The policies from this one on that tokens may be from so far."""
        loading = [] if self._loading is None else [self._loading]
        return [policy for policy in (*self._seen, *loading) if policy.serial >= serial]

    def follow(self, policy: StoredPolicy | None) -> None:
        """Sees to it that the client gets to the announced policy; returns at once. Raises what
        went wrong with the one before."""
        if self._task is not None:
            if not self._task.done():
                return
            task, self._task = self._task, None
            task.result()
        if policy is not None and (self.newest is None or policy.serial > self.newest.serial):
            self._task = asyncio.create_task(self._bring(policy))

    async def enough_for(self, unit: Unit) -> StoredPolicy:
        """Waits until the unit may begin; returns the policy that it begins with."""
        self.waiting += 1
        try:
            async with asyncio.timeout(self._policy_s), self._changed:
                await self._changed.wait_for(
                    lambda: self.newest is not None and self.newest.is_enough_for(unit)
                )
        except TimeoutError as exc:
            raise PipelineError(
                f"waited {self._policy_s:.3g} s for policy {unit.policy} and version "
                f"{unit.version} of the run {self._store.config.run!r}; this actor has "
                f"{'none' if self.newest is None else self.newest.serial}"
            ) from exc
        finally:
            self.waiting -= 1
        return self._seen[-1]

    async def close(self) -> None:
        """Ends what is on its way; call it when no unit is sampled any more."""
        if self._task is not None:
            self._task.cancel()
        closing = [] if self._fetcher is None else [asyncio.to_thread(self._fetcher.close)]
        tasks = [task for task in (self._task, self._arriving) if task is not None]
        await asyncio.gather(*closing, *tasks, return_exceptions=True)

    async def _bring(self, policy: StoredPolicy) -> None:
        """Requests under way go on, and their tokens say which policy each is from."""
        began = time.monotonic()
        if self._client is not None:
            weights: Mapping[str, Any] | None = {}
            if policy.path:
                here = await self._here(policy)
                if here is None or (self.newest is not None and here.serial <= self.newest.serial):
                    return
                policy, began = here, self._heard_at or began
                self._heard_at = None
                weights = await asyncio.to_thread(load_policy, policy)
            if weights is None:  # a newer one is there, of which the actor will hear
                return
            self._loading = policy
            try:
                await self._client.sync_weights(weights, version=policy.serial)
            except PublishError as exc:
                raise PublishError(f"policy {policy.version} does not fit here: {exc}") from exc
        self.loaded_s = time.monotonic() - began
        async with self._changed:
            self._seen, self._loading = [*self._seen, policy][-_REMEMBERED:], None
            self._changed.notify_all()

    async def _here(self, policy: StoredPolicy) -> StoredPolicy | None:
        """The policy with a path that this host can open; None while it is on its way. One that is
        on its way comes first, so that a slow line brings some policy, if not every one."""
        if not policy.url:
            return policy
        if self._fetcher is None:
            self._fetcher = PolicyFetcher(self._store.config, address=self._address)
        if self._arriving is None:
            self._heard_at = time.monotonic()
            self._arriving = asyncio.create_task(asyncio.to_thread(self._fetcher.fetch, policy))
        arrived, _ = await asyncio.wait([self._arriving], timeout=_LOOK_S)
        if not arrived:
            self._fetcher.announced(policy.serial)
            return None
        try:
            return self._arriving.result()
        except NotComingError as exc:  # the policy before it serves on
            _log.warning("%s; this actor tries again, with the newest policy", exc)
            return None
        finally:
            self._arriving = None
