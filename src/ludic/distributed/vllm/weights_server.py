"""One server during a publish of weights: the requests to it, step by step, and its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ludic.distributed.vllm.delivery import ServerUpdate, together
from ludic.errors import ConfigError, DeadlineError, InferenceError, LudicError, PublishError
from ludic.inference.http import UnreachableError
from ludic.inference.vllm.flags import FETCH, RECEIPT, STAGE
from ludic.inference.vllm.switching import CANARY, SWITCH


class WeightsServer(ServerUpdate):
    """Opens an update, takes the tensors in, and applies them, or goes on with the old ones."""

    workers = 1
    joins = False
    """It is to join the others: all of them would wait there for one that is gone."""
    opened = False
    """It may hold what a publish that fails has to have it drop."""
    receipts: Sequence[Mapping[str, Any]] = ()
    """What its workers say that they hold."""
    done = False
    """It has applied the update and serves again."""
    worker_seconds: Mapping[str, float] = {}
    """What the server's slowest worker says that its own parts took."""
    base: str | None = None
    """What the host's copy must be for a difference to be of use; None: nobody asks."""
    has_base = False
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
        if self.joins:
            world = await self.ask("/get_world_size", seconds=self.patience_s, method="GET")
            self.workers = int(world["world_size"])
        if self.was_out is not None:  # it may hang, and the others would wait for it
            await self.call_workers(STAGE, self.patience_s, None)
        if self.base is not None:
            receipts = await self.call_workers(RECEIPT, self.patience_s)
            copies = [r.get("holds") if isinstance(r, Mapping) else None for r in receipts]
            self.has_base = bool(copies) and set(copies) == {self.base}

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

    async def receive(self, update: Mapping[str, Any]) -> None:
        """Has the server stage the tensors. Returns when it has them all, and has said so: over
        running requests every exchange waits for a step of theirs, so it is one."""

        async def work() -> None:
            if source := update.get("source"):
                await self._until_fetched(source)
            tell = self._tell_workers("take the tensors", "tensors", STAGE, dict(update))
            self.receipts = await tell

        self.opened = True
        await self.step("stage", "take the tensors", work)

    async def compare(self, expected: Mapping[str, list[Any]]) -> None:
        """Raises unless every worker has every tensor, bit for bit as it was sent."""

        async def work() -> None:
            self.worker_seconds = _slowest(self.receipts)
            _check(self.replica.url, self.receipts, expected)

        await self.step("compare", "say what arrived", work, asks=False)

    async def pause(self) -> None:
        """Freezes the server's requests; none is lost. What it has computed with the old weights is
        forgotten. One that switches does so by itself."""
        if not self.switches:
            pause = partial(self.ask, "/pause?mode=keep&clear_cache=true")
            await self.step("pause", "pause", pause)

    async def finish(self, version: int, limit_s: float, canary: Sequence[int] | None) -> None:
        """Makes the server use the tensors, drop what it computed before, and resume. One that
        switches by itself gives up after `limit_s`, and stays paused; when it resumes, it scores
        the canary first."""
        facts = self.replica.facts
        weight_name = {"weight_version": str(version)} if facts and facts.names_versions else None
        try:
            if self.switches:
                body = {**(weight_name or {}), "timeout_s": limit_s, "canary": canary}
                answer = await self.ask(SWITCH, body)
                self.stall_s = float(answer["stall_s"])
                self.times.slowest([answer["seconds"]])
            else:
                await self._apply(weight_name)
        except (InferenceError, DeadlineError) as exc:
            self.lose(f"it failed while it applied version {version}: {exc}")
            await self.send_away()
            self.away = await self.is_away(exc)
            return
        self.replica.version = version
        self.replica.out = None
        self.replica.mark_up()
        self.done = True

    async def scores(self) -> list[float] | None:
        """Of the canary that came with `finish`; None where it was not scored."""
        if not self.switches:
            return None
        scores = (await self.ask(CANARY, method="GET")).get("scores")
        return None if scores is None else [float(score) for score in scores]

    async def undo(self) -> None:
        """Drops what was staged; the server keeps the old weights, and is resumed even if somebody
        else paused it. One that was out of rotation stays out."""
        if self.lost:
            return
        try:
            if self.opened:
                with suppress(InferenceError):  # then the next update drops it
                    await self.call_workers(STAGE, self.patience_s, None)
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
            answers = await self._tell_workers("fetch the weights", "fetched", FETCH, source)
            if all(answer["fetched"] for answer in answers):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)

    async def _tell_workers(
        self, what: str, key: str, method: str, *args: Any
    ) -> list[Mapping[str, Any]]:
        """Their answers. Raises where one does not say `key`, but what went wrong."""
        answers = await self.call_workers(method, None, *args)
        for rank, answer in enumerate(answers):
            if not isinstance(answer, Mapping) or key not in answer:
                why = answer.get("error") if isinstance(answer, Mapping) else answer
                raise PublishError(f"{self.replica.url}, worker {rank}, did not {what}: {why}")
        return answers

    async def explained(self, what: str, refusal: InferenceError) -> LudicError:
        if await self._has_our_engine():
            return await super().explained(what, refusal)
        return ConfigError(
            f"{self.replica.url} was started without Ludic's side of a weight transfer, so it "
            f"cannot be updated: start it with `ludic serve`. It said: {refusal}"
        )

    async def send_away(self) -> None:
        """Aborts the server's requests, so that their clients ask elsewhere, and keeps it from
        sampling."""
        with suppress(InferenceError, DeadlineError):
            await self.ask("/pause?mode=abort", seconds=self.patience_s)

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


def _check(
    url: str, receipts: Sequence[Mapping[str, Any]], expected: Mapping[str, list[Any]]
) -> None:
    """Raises unless there are receipts, and all say what is expected."""
    if not receipts:
        raise PublishError(f"{url} did not answer with a receipt")
    for rank, answer in enumerate(receipts):
        arrived = answer["tensors"]
        lacking = sorted(expected.keys() - arrived.keys())
        wrong = [n for n, e in expected.items() if n in arrived and arrived[n] != e]
        if lacking or wrong:
            raise PublishError(
                f"{url}, worker {rank}: {len(lacking)} tensors did not arrive {lacking[:3]}, "
                f"{len(wrong)} arrived changed {wrong[:3]}"
            )


def _slowest(receipts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The longest that a worker says each part took it; nothing of those who do not say."""
    times = [r.get("seconds", {}) for r in receipts]
    parts = ("stage", "checksums")  # how long it took to apply is the last update's
    return {p: max(s[p] for s in times if p in s) for p in parts if any(p in s for s in times)}
