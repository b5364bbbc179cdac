"""Environments for episodes in other processes: each can do something that only shows there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

from ludic.envs import LudicEnv
from ludic.interaction.base import InteractionProtocol, RunSpec, Runtime
from ludic.types import Action, Info, Obs, Rollout, StepOutcome
from tests.rollouts.worlds import GuessEnv


class WhereEnv(GuessEnv):
    """Says in which process it is."""

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        obs, _ = super().env_reset(seed=seed)
        return obs, {"process": os.getpid()}

    def env_step(self, action: Action) -> StepOutcome:
        return StepOutcome("", 1.0, terminated=True, info={"process": os.getpid()})


class DyingEnv(GuessEnv):
    """Ends its process in the first step, as the kernel does where memory runs out."""

    def env_step(self, action: Action) -> StepOutcome:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class TakingEnv(GuessEnv):
    """Says what argument it got."""

    def __init__(self, given: object) -> None:
        super().__init__()
        self.given = given

    def env_step(self, action: Action) -> StepOutcome:
        return StepOutcome(repr(self.given), 1.0, terminated=True)


class FreezingEnv(GuessEnv):
    """Holds up its whole process for longer than anybody waits."""

    blocking: ClassVar[bool] = False

    def env_step(self, action: Action) -> StepOutcome:
        time.sleep(3600)
        raise AssertionError


class Secretive(InteractionProtocol):
    """Records something that cannot be sent."""

    def __init__(self, runtime: Runtime) -> None: ...

    async def run(self, env: LudicEnv[Any, Any, Any], spec: RunSpec) -> list[Rollout]:
        return [Rollout(id="secret", steps=(), meta={"why": lambda: None})]


class TidyEnv(GuessEnv):
    """Takes a while to close, and says in a file that it has."""

    blocking: ClassVar[bool] = True

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = Path(file)

    def close(self) -> None:
        time.sleep(3)
        self.file.write_text("closed")


ENVS: dict[str, Any] = {
    "where": WhereEnv,
    "dying": DyingEnv,
    "freezing": FreezingEnv,
    "tidy": TidyEnv,
    "taking": TakingEnv,
}
