"""One server in the course of one publish: the routes it is told over, and how far it came."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, auto
from typing import Any

from ludic.distributed.vllm.timing import Stages, together
from ludic.errors import ConfigError, DeadlineError, InferenceError, PublishError
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.replica import Replica, UnreachableError

CLEAN_UP_TIMEOUT_S = 10.0
_RECEIPT = {"method": "ludic_receipt"}


class Stage(Enum):
    """How far a server came."""

    NEW = auto()
    GREETED = auto()
    STARTED = auto()
    PAUSED = auto()
    APPLYING = auto()
    DONE = auto()
    UNDONE = auto()
    """It failed before the new weights were used, and goes on with the old ones."""
    LOST = auto()
    """It does not answer, or nobody can say which weights it has: it is out of rotation."""


class ServerUpdate:
    """Tells one server what to do, checks every status, and remembers how far it is.

    A server that does not answer any more is lost, and so is one that was out of rotation and
    refuses: neither keeps the others from being updated. Any other refusal is raised.
    """

    def __init__(self, client: VLLMChatClient, replica: Replica, timeout_s: float) -> None:
        self.client, self.replica, self.timeout_s = client, replica, timeout_s
        # One that hangs must leave the others time for the rest of a short publish.
        self.clean_up_s = min(CLEAN_UP_TIMEOUT_S, timeout_s / 4)
        self.stage = Stage.NEW
        self.workers = 1
        self.stages = Stages()
        self.worker_seconds: dict[str, float] = {}
        """What the server's slowest worker says that its own parts took."""
        self._was_out = replica.out

    async def greet(self) -> None:
        """Finds out whether the server is there and can be updated."""
        replica = self.replica
        try:
            with self.stages.timed("greet"):
                # One that was away may be another by now; the others only say how many they are.
                if replica.facts is None or replica.lost or replica.out is not None:
                    await self.client.relearn(replica, self.clean_up_s)
                facts = replica.facts
                if facts is not None and not facts.updates:
                    raise ConfigError(
                        f"{replica.url} (vLLM {facts.vllm_version}) has no routes for weight "
                        "updates: start it with `python -m ludic.inference.vllm.server`, which "
                        "sets VLLM_SERVER_DEV_MODE=1; vLLM before 0.26 has none at all"
                    )
                world = await self._ask("GET", "/get_world_size", seconds=self.clean_up_s)
        except (UnreachableError, DeadlineError) as exc:
            self.lose(f"it did not answer when a publish began: {exc}")
            return
        except ConfigError as exc:
            if self._was_out is None:
                raise
            self.lose(str(exc))
            return
        self.workers = int(world["world_size"])
        self.stage = Stage.GREETED

    async def invite(self, invitation: dict[str, Any], rank_offset: int) -> None:
        """Has the server's workers join the trainer's broadcast group."""
        body = {"init_info": {**invitation, "rank_offset": rank_offset}}
        await self._ask("POST", "/init_weight_transfer_engine", body)

    async def start(self) -> None:
        """Opens the update; one that a dead trainer left open is closed first."""
        with self.stages.timed("start"):
            await self._open()
        if self.stage is not Stage.LOST:
            self.stage = Stage.STARTED

    async def receive(self, update: dict[str, Any]) -> None:
        """Has the server stage the tensors. Returns when it has them all."""
        with self.stages.timed("stage"):
            await self._tell("/update_weights", "take the tensors", {"update_info": update})

    async def compare(self, expected: Mapping[str, list[Any]]) -> None:
        """Raises unless every worker has every tensor, bit for bit as it was sent."""
        with self.stages.timed("compare"):
            answer = await self._tell("/collective_rpc", "say what arrived", _RECEIPT)
            if self.stage is Stage.LOST:
                return
            try:
                self.worker_seconds = _slowest(answer["results"], ("stage", "checksums"))
                _check(self.replica.url, answer["results"], expected)
            except PublishError as exc:
                if self._was_out is None:
                    raise
                self.lose(f"it was to be brought back: {exc}")

    async def pause(self) -> None:
        """Freezes the server's requests; none is lost."""
        with self.stages.timed("pause"):
            await self._tell("/pause?mode=keep&clear_cache=true", "pause")
        if self.stage is not Stage.LOST:
            self.stage = Stage.PAUSED

    async def finish(self, version: int) -> None:
        """Has the server use the tensors, forget what it computed with the old, and go on."""
        if self.stage is not Stage.PAUSED:
            return
        self.stage = Stage.APPLYING
        facts = self.replica.facts
        named = {"weight_version": str(version)} if facts and facts.names_versions else None
        forget = "/reset_prefix_cache?reset_running_requests=true"
        try:
            # It computes nothing meanwhile, so it does not matter which of the two comes first.
            await together(
                [
                    self._post("apply", "/finish_weight_update", named),
                    self._post("reset", forget),
                ]
            )
            await self._post("resume", "/resume")
        except (InferenceError, DeadlineError) as exc:
            self.lose(f"it failed while it applied version {version}: {exc}")
            await self._send_away()
            return
        self.replica.version = version
        self.replica.out = None
        self.replica.mark_up()
        self.stage = Stage.DONE

    async def look_back(self) -> None:
        """Asks how long it took to apply, for the log; without an answer nothing is known."""
        with suppress(InferenceError, DeadlineError):
            answer = await self._ask("POST", "/collective_rpc", _RECEIPT)
            self.worker_seconds |= _slowest(answer["results"], ("apply",))

    async def undo(self) -> None:
        """Drops what was staged; the server goes on with the old weights, whatever paused it. One
        that was out of rotation stays there."""
        if self.stage not in (Stage.GREETED, Stage.STARTED, Stage.PAUSED):
            return
        try:
            if self.stage is not Stage.GREETED:
                await self._discard()
            if self._was_out is not None:
                self.lose(self._was_out)
                return
            await self._ask("POST", "/resume", seconds=self.clean_up_s)
            self.stage = Stage.UNDONE
        except (InferenceError, DeadlineError) as exc:
            self.lose(f"it could not be resumed after a failed publish: {exc}")
            await self._send_away()

    def lose(self, why: str) -> None:
        """Takes the server out of rotation: nobody can say which weights it has."""
        self.stage = Stage.LOST
        self.replica.out = why

    async def _open(self) -> None:
        # One that is out may hang, and the others wait for it.
        limit = self.timeout_s if self._was_out is None else self.clean_up_s
        try:
            await self._ask("POST", "/start_weight_update", seconds=limit)
        except DeadlineError as exc:
            if self._was_out is None:
                raise
            self.lose(str(exc))
        except InferenceError as exc:
            if _is_gone(exc):
                self.lose(f"it went away when it was to open an update: {exc}")
                return
            with suppress(DeadlineError):
                await self._discard()
            await self._tell("/start_weight_update", "open an update")

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

    async def _tell(self, path: str, what: str, body: Any = None) -> Any:
        """The answer; None where the server is lost."""
        if self.stage is Stage.LOST:
            return None
        try:
            return await self._ask("POST", path, body)
        except InferenceError as exc:
            if _is_gone(exc):
                self.lose(f"it went away when it was to {what}: {exc}")
            elif self._was_out is not None:
                self.lose(f"it was to be brought back, and did not {what}: {exc}")
            elif await self._has_our_engine():
                raise
            else:
                raise ConfigError(
                    f"{self.replica.url} was started without Ludic's side of a weight transfer, so "
                    f"it cannot be updated: start it with `ludic serve`. It said: {exc}"
                ) from exc
        return None

    async def _has_our_engine(self) -> bool:
        """Whether its workers can say what arrived."""
        try:
            answer = await self._ask("POST", "/collective_rpc", _RECEIPT, self.clean_up_s)
            return all("tensors" in receipt for receipt in answer["results"])
        except (InferenceError, DeadlineError, KeyError, TypeError):
            return False

    async def _post(self, stage: str, path: str, body: Any = None) -> None:
        with self.stages.timed(stage):
            await self._ask("POST", path, body)

    async def _ask(
        self, method: str, path: str, body: Any = None, seconds: float | None = None
    ) -> Any:
        return await self.client.control(
            self.replica, method, path, body=body, timeout_s=seconds or self.timeout_s
        )


def _is_gone(exc: Exception) -> bool:
    return isinstance(exc, UnreachableError) and exc.status is None


def _check(url: str, receipts: list[Any], expected: Mapping[str, list[Any]]) -> None:
    """Raises unless there are receipts, and all say what is expected."""
    if not receipts:
        raise PublishError(f"{url} answered without a receipt")
    for rank, receipt in enumerate(receipts):
        if not isinstance(receipt, Mapping) or "tensors" not in receipt:
            why = receipt.get("error") if isinstance(receipt, Mapping) else receipt
            raise PublishError(f"{url}, worker {rank}, has no receipt: {why}")
        arrived = receipt["tensors"]
        lacking = sorted(expected.keys() - arrived.keys())
        wrong = [n for n, e in expected.items() if n in arrived and arrived[n] != e]
        if lacking or wrong:
            raise PublishError(
                f"{url}, worker {rank}: {len(lacking)} tensors did not arrive {lacking[:3]}, "
                f"{len(wrong)} arrived changed {wrong[:3]}"
            )


def _slowest(receipts: list[Any], parts: tuple[str, ...]) -> dict[str, float]:
    """The longest that a worker says each part took it; nothing of those who do not say."""
    said = [r.get("seconds", {}) for r in receipts if isinstance(r, Mapping)]
    return {p: max(s[p] for s in said if p in s) for p in parts if any(p in s for s in said)}
