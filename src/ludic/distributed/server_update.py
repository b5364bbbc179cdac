"""One server in the course of one publish: the routes it is told over, and how far it came."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from ludic.errors import ConfigError, DeadlineError, InferenceError, PublishError
from ludic.inference.vllm_client import VLLMChatClient
from ludic.inference.vllm_replica import Replica, UnreachableError

CLEAN_UP_TIMEOUT_S = 10.0


class Stage(Enum):
    """How far a server came."""

    NEW = auto()
    GREETED = auto()
    PAUSED = auto()
    STARTED = auto()
    APPLYING = auto()
    DONE = auto()
    UNDONE = auto()
    """It failed before the new weights were used, and goes on with the old ones."""
    LOST = auto()
    """It does not answer, or nobody can say which weights it has: it is out of rotation."""


class ServerUpdate:
    """Tells one server what to do, checks every status, and remembers how far it is."""

    def __init__(self, client: VLLMChatClient, replica: Replica, timeout_s: float) -> None:
        self.client, self.replica, self.timeout_s = client, replica, timeout_s
        self.clean_up_s = min(CLEAN_UP_TIMEOUT_S, timeout_s)
        self.stage = Stage.NEW
        self.workers = 1

    async def greet(self) -> None:
        """Finds out whether the server is there and can be updated."""
        replica = self.replica
        try:
            # One that was away may be another by now; the others are only asked how many they are.
            if replica.facts is None or replica.lost or replica.out is not None:
                await self.client.relearn(replica, self.clean_up_s)
            facts = replica.facts
            if facts is not None and not facts.updates:
                raise ConfigError(
                    f"{replica.url} (vLLM {facts.vllm_version}) has no routes for weight updates: "
                    "start it with `python -m ludic.inference.vllm_server`, which sets "
                    "VLLM_SERVER_DEV_MODE=1; vLLM before 0.26 has none at all"
                )
            world = await self._ask("GET", "/get_world_size", seconds=self.clean_up_s)
        except (UnreachableError, DeadlineError) as exc:
            self.lose(f"it did not answer when a publish began: {exc}")
            return
        self.workers = int(world["world_size"])
        self.stage = Stage.GREETED

    async def pause(self) -> None:
        """Freezes the server's requests; none is lost."""
        if await self._tell("/pause?mode=keep&clear_cache=true", "pause"):
            self.stage = Stage.PAUSED

    async def invite(self, invitation: dict[str, Any], rank_offset: int) -> None:
        """Has the server's workers join the trainer's broadcast group."""
        body = {"init_info": {**invitation, "rank_offset": rank_offset}}
        await self._ask("POST", "/init_weight_transfer_engine", body)

    async def start(self) -> None:
        """Opens the update; one that a dead trainer left open is closed first."""
        try:
            await self._ask("POST", "/start_weight_update")
        except InferenceError as exc:
            if _is_gone(exc):
                self.lose(str(exc))
                return
            with suppress(InferenceError):
                await self._discard()
            await self._ask("POST", "/start_weight_update")
        self.stage = Stage.STARTED

    async def receive(self, update: dict[str, Any]) -> None:
        """Has the server stage the tensors. Returns when it has them all."""
        await self._tell("/update_weights", "take the tensors", {"update_info": update})

    async def compare(self, expected: Mapping[str, list[Any]]) -> None:
        """Raises unless every worker has every tensor, bit for bit as it was sent."""
        if self.stage is Stage.LOST:
            return
        answer = await self._ask("POST", "/collective_rpc", {"method": "ludic_receipt"})
        for rank, receipt in enumerate(answer["results"]):
            if not isinstance(receipt, Mapping) or "tensors" not in receipt:
                why = receipt.get("error") if isinstance(receipt, Mapping) else receipt
                raise PublishError(f"{self.replica.url}, worker {rank}, has no receipt: {why}")
            arrived = receipt["tensors"]
            lacking = sorted(expected.keys() - arrived.keys())
            wrong = [n for n, e in expected.items() if n in arrived and arrived[n] != e]
            if lacking or wrong:
                raise PublishError(
                    f"{self.replica.url}, worker {rank}: {len(lacking)} tensors did not arrive "
                    f"{lacking[:3]}, {len(wrong)} arrived changed {wrong[:3]}"
                )

    async def finish(self, version: int) -> None:
        """Has the server use the tensors, forget what it computed with the old, and go on."""
        if self.stage is not Stage.STARTED:
            return
        self.stage = Stage.APPLYING
        facts = self.replica.facts
        named = {"weight_version": str(version)} if facts and facts.names_versions else None
        try:
            await self._ask("POST", "/finish_weight_update", named)
            await self._ask("POST", "/reset_prefix_cache?reset_running_requests=true")
            await self._ask("POST", "/resume")
        except (InferenceError, DeadlineError) as exc:
            self.lose(f"it failed while it applied version {version}: {exc}")
            await self._send_away()
            return
        self.replica.version = version
        self.replica.out = None
        self.replica.mark_up()
        self.stage = Stage.DONE

    async def undo(self) -> None:
        """Drops what was staged and resumes on the old weights."""
        if self.stage not in (Stage.PAUSED, Stage.STARTED, Stage.GREETED):
            return
        try:
            if self.stage is Stage.STARTED:
                with suppress(UnreachableError):
                    await self._discard()
            await self._ask("POST", "/resume", seconds=self.clean_up_s)
            self.stage = Stage.UNDONE
        except (InferenceError, DeadlineError) as exc:
            self.lose(f"it could not be resumed after a failed publish: {exc}")
            await self._send_away()

    async def _send_away(self) -> None:
        """Ends the server's requests, so that whoever waits for them asks elsewhere."""
        with suppress(InferenceError, DeadlineError):
            await self._ask("POST", "/pause?mode=abort", seconds=self.clean_up_s)

    async def _discard(self) -> None:
        body = {"update_info": {"plane": "discard"}}
        with suppress(InferenceError):
            # Refused when a failed part has closed the update already.
            await self._ask("POST", "/update_weights", body, self.clean_up_s)
            await self._ask("POST", "/finish_weight_update", None, self.clean_up_s)

    async def _tell(self, path: str, what: str, body: Any = None) -> bool:
        """Whether the server did it; a server that is gone is lost, a refusal is raised."""
        if self.stage is Stage.LOST:
            return False
        try:
            await self._ask("POST", path, body)
        except InferenceError as exc:
            if _is_gone(exc):
                self.lose(f"it went away when it was to {what}: {exc}")
                return False
            raise
        return True

    async def _ask(
        self, method: str, path: str, body: Any = None, seconds: float | None = None
    ) -> Any:
        return await self.client.control(
            self.replica, method, path, body=body, timeout_s=seconds or self.timeout_s
        )

    def lose(self, why: str) -> None:
        """Takes the server out of rotation: nobody can say which weights it has."""
        self.stage = Stage.LOST
        self.replica.out = why


def _is_gone(exc: Exception) -> bool:
    return isinstance(exc, UnreachableError) and exc.status is None
