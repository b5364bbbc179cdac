"""One server during a publish of weights: what it is asked, step by step, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ludic.distributed.vllm.delivery import ServerUpdate, together
from ludic.errors import ConfigError, DeadlineError, InferenceError, LudicError, PublishError
from ludic.inference.http import UnreachableError
from ludic.inference.vllm.flags import FETCH, RECEIPT
from ludic.inference.vllm.switching import SWITCH


class WeightsServer(ServerUpdate):
    """Opens an update, takes the tensors in, and applies them, or goes on with the old ones."""

    workers = 1
    opened = False
    done = False
    """It has applied the update and serves again."""
    worker_seconds: Mapping[str, float] = {}
    """What the server's slowest worker says that its own parts took."""
    base: str | None = None
    """What the host's copy must be for a difference to be of use; None: nobody asks."""
    has_base = False
    by_priority = False
    """Whether it computes requests with a lower number for `priority` first."""
    stall_s: float | None = None
    """How long sampling stood still, where the server says so."""

    @property
    def switches(self) -> bool:
        return self.replica.facts is not None and self.replica.facts.switches

    async def examine(self) -> None:
        facts = self.replica.facts
        if facts is not None and not facts.updates:
            raise ConfigError(
                f"{self.replica.url} (vLLM {facts.vllm_version}) has no routes for weight "
                "updates: start it with `python -m ludic.inference.vllm_server`, which "
                "sets VLLM_SERVER_DEV_MODE=1; vLLM before 0.26 does not have them"
            )
        world = await self.ask("/get_world_size", seconds=self.patience_s, method="GET")
        self.workers = int(world["world_size"])
        if self.base is not None:
            receipts = await self.call_workers(RECEIPT, self.patience_s)
            held = [r.get("holds") if isinstance(r, Mapping) else None for r in receipts]
            self.has_base = bool(held) and set(held) == {self.base}

    async def invite(self, invitation: Mapping[str, Any], rank_offset: int) -> None:
        """Has the server's workers join the trainer's broadcast group. Raises where they do not:
        the trainer would wait for them there."""
        body = {"init_info": {**invitation, "rank_offset": rank_offset}}
        try:
            await self.ask("/init_weight_transfer_engine", body)
        except UnreachableError as exc:
            if await self.is_away(exc):
                self.lose(f"it went away when it was to join a broadcast: {exc}", away=True)
            raise

    async def start(self) -> None:
        """Opens the update; one that a dead trainer left open is closed first."""
        await self.step("start", "open an update", self._open)
        self.opened = not self.lost

    async def receive(self, update: Mapping[str, Any]) -> None:
        """Has the server stage the tensors. Returns when it has them all."""
        body = {"update_info": dict(update)}

        async def work() -> None:
            if source := update.get("source"):
                await self._until_fetched(source)
            await self.ask("/update_weights", body)

        await self.step("stage", "take the tensors", work)

    async def compare(self, expected: Mapping[str, list[Any]]) -> None:
        """Raises unless every worker has every tensor, bit for bit as it was sent."""

        async def work() -> None:
            receipts = await self.call_workers(RECEIPT)
            self.worker_seconds = _slowest(receipts, ("stage", "checksums"))
            self.by_priority = all(
                isinstance(r, Mapping) and r.get("scheduling") == "priority" for r in receipts
            )
            _check(self.replica.url, receipts, expected)

        await self.step("compare", "say what arrived", work)

    async def pause(self) -> None:
        """Freezes the server's requests; none is lost. What it has computed with the old weights is
        forgotten. One that switches does so by itself."""
        if not self.switches:
            pause = partial(self.ask, "/pause?mode=keep&clear_cache=true")
            await self.step("pause", "pause", pause)

    async def finish(self, version: int, limit_s: float) -> None:
        """Has the server use the tensors, forget what it computed with the old, and go on. One that
        switches by itself gives up after `limit_s`, and stays paused."""
        facts = self.replica.facts
        named = {"weight_version": str(version)} if facts and facts.names_versions else None
        try:
            if self.switches:
                answer = await self.ask(SWITCH, {**(named or {}), "timeout_s": limit_s})
                self.stall_s = float(answer["stall_s"])
                self.times.slowest([answer["seconds"]])
            else:
                await self._apply(named)
        except (InferenceError, DeadlineError) as exc:
            self.lose(f"it failed while it applied version {version}: {exc}")
            await self.send_away()
            self.away = await self.is_away(exc)
            return
        self.replica.version = version
        self.replica.out = None
        self.replica.mark_up()
        self.done = True

    async def look_back(self) -> None:
        """Asks how long it took to apply, for the log; without an answer nothing is known."""
        with suppress(InferenceError, DeadlineError):
            receipts = await self.call_workers(RECEIPT)
            self.worker_seconds = {**self.worker_seconds, **_slowest(receipts, ("apply",))}

    async def undo(self) -> None:
        """Drops what was staged; the server goes on with the old weights, and is resumed even
        where somebody else paused it. One that was out of rotation stays there."""
        if self.lost:
            return
        try:
            if self.opened:
                await self._discard()
            if self.was_out is not None:
                self.lose(self.was_out)
                return
            await self.ask("/resume", seconds=self.patience_s)
        except (InferenceError, DeadlineError) as exc:
            self.lose(f"it could not be resumed after a failed publish: {exc}")
            await self.send_away()
            self.away = await self.is_away(exc)

    async def _until_fetched(self, source: Mapping[str, Any]) -> None:
        """A thread of each worker fetches: while a worker takes an update in, it does not sample.
        The publish's deadline ends it."""
        pause_s = 0.02
        while True:
            answers = await self.call_workers(FETCH, None, source)
            for answer in answers:
                if not isinstance(answer, Mapping) or "fetched" not in answer:
                    why = answer.get("error") if isinstance(answer, Mapping) else answer
                    raise PublishError(f"{self.replica.url} did not fetch the weights: {why}")
            if all(answer["fetched"] for answer in answers):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)

    async def explained(self, what: str, refusal: InferenceError) -> LudicError:
        if await self._has_our_engine():
            return await super().explained(what, refusal)
        return ConfigError(
            f"{self.replica.url} was started without Ludic's side of a weight transfer, so it "
            f"cannot be updated: start it with `ludic serve`. It said: {refusal}"
        )

    async def _open(self) -> None:
        # One that is out may hang, and the others wait for it.
        limit = self.timeout_s if self.was_out is None else self.patience_s
        try:
            await self.ask("/start_weight_update", seconds=limit)
        except InferenceError as exc:
            if isinstance(exc, UnreachableError) and exc.status is None:
                raise
            with suppress(DeadlineError):
                await self._discard()
            await self.ask("/start_weight_update")

    async def send_away(self) -> None:
        """Ends the server's requests, so that whoever waits for them asks elsewhere, and keeps it
        from sampling."""
        with suppress(InferenceError, DeadlineError):
            await self.ask("/pause?mode=abort", seconds=self.patience_s)

    async def _discard(self) -> None:
        body = {"update_info": {"plane": "discard"}}
        with suppress(InferenceError):
            # Refused when a failed part has closed the update already.
            await self.ask("/update_weights", body, self.patience_s)
            await self.ask("/finish_weight_update", None, self.patience_s)

    async def _has_our_engine(self) -> bool:
        """Whether its workers can say what arrived."""
        try:
            receipts = await self.call_workers(RECEIPT, self.patience_s)
            return all("tensors" in receipt for receipt in receipts)
        except (InferenceError, DeadlineError, KeyError, TypeError):
            return False

    async def _apply(self, named: Mapping[str, str] | None) -> None:
        """Step by step, for a server without the route for it."""
        forget = "/reset_prefix_cache?reset_running_requests=true"
        # It computes nothing meanwhile, so it does not matter which of the two comes first.
        await together(
            [self._timed("apply", "/finish_weight_update", named), self._timed("reset", forget)]
        )
        await self._timed("resume", "/resume")

    async def _timed(self, stage: str, path: str, body: Any = None) -> None:
        with self.times.timed(stage):
            await self.ask(path, body)


def _check(url: str, receipts: list[Any], expected: Mapping[str, list[Any]]) -> None:
    """Raises unless there are receipts, and all say what is expected."""
    if not receipts:
        raise PublishError(f"{url} did not answer with a receipt")
    for rank, answer in enumerate(receipts):
        if not isinstance(answer, Mapping) or "tensors" not in answer:
            why = answer.get("error") if isinstance(answer, Mapping) else answer
            raise PublishError(f"{url}, worker {rank}, has no receipt: {why}")
        arrived = answer["tensors"]
        lacking = sorted(expected.keys() - arrived.keys())
        wrong = [n for n, e in expected.items() if n in arrived and arrived[n] != e]
        if lacking or wrong:
            raise PublishError(
                f"{url}, worker {rank}: {len(lacking)} tensors did not arrive {lacking[:3]}, "
                f"{len(wrong)} arrived changed {wrong[:3]}"
            )


def _slowest(receipts: list[Any], parts: tuple[str, ...]) -> dict[str, float]:
    """The longest that a worker says each part took it; nothing of those who do not say."""
    took = [r.get("seconds", {}) for r in receipts if isinstance(r, Mapping)]
    return {p: max(s[p] for s in took if p in s) for p in parts if any(p in s for s in took)}
