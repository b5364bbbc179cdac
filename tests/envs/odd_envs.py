"""Environments that misbehave in one way each, and some that only look unusual."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.types import Action, Info, Obs, StepOutcome

Isolation = Literal["thread", "process"]


class CountEnv(SingleAgentEnv):
    """Counts to `end`; says which thread it was called in."""

    def __init__(self, end: int = 2) -> None:
        self.end = end
        self.count = 0
        self.threads: list[str] = []
        self.closed = 0

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self.threads.append(threading.current_thread().name)
        self.count = 0
        return f"seed {seed}", {"seed": seed}

    def env_step(self, action: Action) -> StepOutcome:
        self.threads.append(threading.current_thread().name)
        self.count += 1
        return StepOutcome(f"{action} {self.count}", 0.5, terminated=self.count >= self.end)

    def env_current_obs(self) -> Obs:
        return str(self.count)

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        return f"count, {agent_id}"

    def task_key(self) -> str | None:
        return f"count to {self.end}"

    def close(self) -> None:
        self.closed += 1


class DirectCountEnv(CountEnv):
    blocking: ClassVar[bool] = False


class AsyncCountEnv(CountEnv):
    async def env_reset(  # type: ignore[override]
        self, *, seed: int | None = None
    ) -> tuple[Obs, Info]:
        await asyncio.sleep(0)
        return super().env_reset(seed=seed)

    async def env_step(self, action: Action) -> StepOutcome:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().env_step(action)


class HalfAsyncCountEnv(CountEnv):
    """`step` is a plain function that gives back something to wait for."""

    def env_step(self, action: Action) -> Any:
        async def later() -> StepOutcome:
            return CountEnv.env_step(self, action)

        return later()


class HangingEnv(CountEnv):
    """Blocks in its first step until `release` is set, or for `seconds`."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__()
        self.release = threading.Event()
        self.seconds = seconds
        self.entered = threading.Event()

    def env_step(self, action: Action) -> StepOutcome:
        self.entered.set()
        self.release.wait(self.seconds)
        return super().env_step(action)


class AsyncHangingEnv(CountEnv):
    def __init__(self, *, stubborn: bool = False) -> None:
        super().__init__()
        self.stubborn = stubborn
        self.cancelled = 0

    async def env_step(self, action: Action) -> StepOutcome:  # type: ignore[override]
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                if not self.stubborn or self.cancelled > 1:
                    raise


class RaisingEnv(CountEnv):
    """Raises what it is given, in `reset` or `step`."""

    blocking: ClassVar[bool] = False

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        if self.where == "reset":
            raise self.error
        return super().env_reset(seed=seed)

    def env_step(self, action: Action) -> StepOutcome:
        if self.where == "step":
            raise self.error
        return super().env_step(action)


class BlockingRaisingEnv(RaisingEnv):
    blocking: ClassVar[bool] = True


class AsyncRaisingEnv(RaisingEnv):
    async def env_step(self, action: Action) -> StepOutcome:  # type: ignore[override]
        return super().env_step(action)


class AnyEnv(LudicEnv[str, Any, Any]):
    """Two agents; `reset` and `step` give back exactly what the test says."""

    blocking: ClassVar[bool] = False

    def __init__(
        self,
        *,
        opening: Any = None,
        steps: Sequence[Any] = (),
        active: Callable[[int], Sequence[str]] = lambda step: ("a",),
    ) -> None:
        self.opening = {"a": ("", {}), "b": ("", {})} if opening is None else opening
        self.steps = list(steps)
        self.active = active
        self.taken = 0

    @property
    def agent_ids(self) -> Sequence[str]:
        return ("a", "b")

    @property
    def active_agents(self) -> Sequence[str]:
        return self.active(self.taken)

    def reset(self, *, seed: int | None = None) -> Any:
        self.taken = 0
        return self.opening

    def step(self, actions: Mapping[str, Any]) -> Any:
        self.taken += 1
        return self.steps[self.taken - 1]

    def current_obs(self) -> Mapping[str, Any]:
        return {"a": "", "b": ""}


class PartialEnv(AnyEnv):
    accepts_partial_actions: ClassVar[bool] = True


class ProcessCountEnv(CountEnv):
    isolation: ClassVar[Isolation] = "process"


class ProcessOddEnv(CountEnv):
    """In a process of its own, does what the action says."""

    isolation: ClassVar[Isolation] = "process"

    def env_step(self, action: Action) -> StepOutcome:
        if action == "hang":
            while True:
                pass
        if action == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            return StepOutcome(str(child.pid), 0.0)
        if action == "print":
            print("noise on the standard output", flush=True)
        if action == "exit":
            sys.exit(3)
        if action == "die":
            import os

            os._exit(9)
        if action == "raise":
            raise ValueError("a bad move")
        if action == "nan":
            return StepOutcome("", float("nan"))
        if action == "not json":
            return StepOutcome("", 0.0, info={"x": object()})
        if action == "big":
            return StepOutcome("x" * 1_000_000, 1.0)
        if action == "slow":
            time.sleep(0.2)
        return super().env_step(action)


class ProcessAsyncEnv(AsyncCountEnv):
    isolation: ClassVar[Isolation] = "process"
