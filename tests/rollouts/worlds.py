"""Small environments and policies for the rollout tests: real protocols, agents and templates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, ClassVar

from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.inference.scripted_client import ScriptedCall, ScriptedChatClient
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction.base import Runtime
from ludic.registry import PROTOCOLS
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.types import Action, Info, Obs, StepOutcome

PLAIN = ProtocolSpec("single_agent", {"parser": "text"})


class GuessEnv(SingleAgentEnv):
    """Guess a digit that the seed chose; ends when it is right, or after `tries`."""

    blocking: ClassVar[bool] = False

    def __init__(self, tries: int = 3) -> None:
        self.tries = tries
        self.closed = False

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self._secret = Random(seed).randrange(4)
        self._left = self.tries
        return "Guess a digit from 0 to 3.", {}

    def env_step(self, action: Action) -> StepOutcome:
        self._left -= 1
        if action.strip() == str(self._secret):
            return StepOutcome("Right.", 1.0, terminated=True)
        return StepOutcome(f"Wrong, {self._left} left.", 0.0, truncated=self._left == 0)

    def env_current_obs(self) -> Obs:
        return "Guess."

    def task_key(self) -> str | None:
        return f"guess-{self._secret}"

    def close(self) -> None:
        self.closed = True


class BrokenEnv(GuessEnv):
    """Raises in its first step."""

    def env_step(self, action: Action) -> StepOutcome:
        raise RuntimeError("the board fell off the table")


class HangingEnv(GuessEnv):
    """Hangs in its first step for a while, in a thread of its own."""

    blocking: ClassVar[bool] = True

    def env_step(self, action: Action) -> StepOutcome:
        time.sleep(1.0)
        return super().env_step(action)


class DuelEnv(LudicEnv[str, str, str]):
    """Two agents say a number in turns; the larger one wins, and both hear it."""

    blocking: ClassVar[bool] = False
    closed = False

    @property
    def agent_ids(self) -> Sequence[str]:
        return ("first", "second")

    @property
    def active_agents(self) -> Sequence[str]:
        return ("first",) if self._said is None else ("second",)

    def reset(self, *, seed: int | None = None) -> Mapping[str, tuple[str, Info]]:
        self._said: str | None = None
        return {agent: (f"Duel {(seed or 0) % 100}: say a digit.", {}) for agent in self.agent_ids}

    def step(self, actions: Mapping[str, str]) -> Mapping[str, StepOutcome]:
        if self._said is None:
            self._said = actions["first"]
            return {
                "first": StepOutcome("Wait.", 0.0),
                "second": StepOutcome("It is your turn.", 0.0),
            }
        won = float(self._said > actions["second"])
        return {
            "first": StepOutcome("Over.", won, terminated=True),
            "second": StepOutcome("Over.", 1.0 - won, terminated=True),
        }

    def current_obs(self) -> Mapping[str, str]:
        return dict.fromkeys(self.agent_ids, "look")

    def close(self) -> None:
        self.closed = True


ENVS: dict[str, Callable[..., LudicEnv[Any, Any, Any]]] = {
    "guess": GuessEnv,
    "broken": BrokenEnv,
    "hanging": HangingEnv,
    "duel": DuelEnv,
}


@cache
def template() -> HFChatTemplate:
    return HFChatTemplate(tiny_tokenizer())


def random_digit(call: ScriptedCall) -> str:
    """A digit that only the request's seed decides: the same request, the same answer."""
    return str(Random(call.request.sampling.seed).randrange(4))


def runtime(policy: Callable[[ScriptedCall], Any] = random_digit, **options: Any) -> Runtime:
    return Runtime(ScriptedChatClient(policy, template(), **options), template(), "scripted")


def protocols() -> dict[str, Any]:
    """The built-in protocols as a registry of one's own."""
    return {name: PROTOCOLS.get(name) for name in ("single_agent", "multi_agent", "delegating")}


def engine(policy: Callable[[ScriptedCall], Any] = random_digit, **options: Any) -> RolloutEngine:
    client = {
        k: options.pop(k) for k in ("latency_s", "fault", "max_context_tokens") if k in options
    }
    envs = {**ENVS, **options.pop("envs", {})}
    return RolloutEngine(envs, protocols(), runtime=runtime(policy, **client), **options)


def request(kind: str = "guess", **options: Any) -> RolloutRequest:
    protocol = ProtocolSpec("multi_agent", {"parser": "text"}) if kind == "duel" else PLAIN
    kwargs = options.pop("kwargs", {})
    return RolloutRequest(EnvSpec(kind, kwargs), options.pop("protocol", protocol), **options)
