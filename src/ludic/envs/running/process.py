"""An environment in a separate process, which can be killed when it hangs."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, EnvError
from ludic.lazy import resolve
from ludic.registry import ENVS, make_env, names_are_stored, stored_names
from ludic.types import AgentID, EnvSpec, Info, Obs, StepOutcome
from ludic.workers.json_process import Answerer, ChildError, JsonProcess

EnvFactory = Callable[..., LudicEnv[Any, Any, Any]]


def build_env(
    spec: EnvSpec,
    factory: EnvFactory | None = None,
    *,
    isolation: Literal["thread", "process"] | None = None,
) -> LudicEnv[Any, Any, Any]:
    """The environment that `spec` describes, in a separate process if it asks for one.

    Args:
        factory: Makes the environment; None looks `spec.kind` up in the registry.
        isolation: Overrides what the environment itself asks for.
    """
    made = factory or ENVS.get(spec.kind)
    asked = made.isolation if isinstance(made, type) and issubclass(made, LudicEnv) else None
    if (isolation or asked) == "process":
        return ProcessEnv(spec, factory)
    env = factory(**spec.kwargs) if factory else make_env(spec.kind, **spec.kwargs)
    if isolation is None and env.isolation == "process" and not isinstance(env, ProcessEnv):
        env.close()  # made by a function, it says only now that it wants to live elsewhere
        return ProcessEnv(spec, factory)
    return env


class ProcessEnv(LudicEnv[AgentID, Obs, str]):
    """Stands for an environment that is built and run in another process.

    Only JSON crosses over: the spec's arguments, actions, and outcomes. The child imports the
    factory (by default the one registered as `spec.kind`) by its module and name, so that one
    made in a notebook or as a lambda cannot be isolated. The child starts with the first `reset`; a
    runner's deadline kills it. What the environment raises arrives as an `EnvError`.

    One worker thread at a time calls `reset` and `step`; only `kill` may come from another thread
    meanwhile. It sets `_closed` before it looks for a process, and `reset` looks at `_closed`
    again after it has started one: whichever comes first, the child does not outlive the kill.
    """

    isolation: ClassVar[Literal["thread", "process"]] = "process"

    def __init__(
        self, spec: EnvSpec, factory: EnvFactory | None = None, *, timeout_s: float = 3600.0
    ) -> None:
        self.name = spec.kind
        self._timeout_s = timeout_s
        self._setup = {
            "factory": _reference(spec.kind, factory or ENVS.get(spec.kind)),
            "kwargs": dict(spec.kwargs),
            "stored": names_are_stored(),
        }
        try:
            json.dumps(self._setup)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"environment {spec.kind!r} cannot run in a separate process: its arguments "
                f"must be JSON ({error})"
            ) from error
        self._process: JsonProcess | None = None
        self._closed = False
        self._state: Mapping[str, Any] = {}

    @property
    def accepts_partial_actions(self) -> bool:  # type: ignore[override]
        return bool(self._seen("accepts_partial_actions"))

    @property
    def agent_ids(self) -> Sequence[AgentID]:
        return tuple(self._seen("agent_ids"))

    @property
    def active_agents(self) -> Sequence[AgentID]:
        return tuple(self._seen("active_agents"))

    def reset(self, *, seed: int | None = None) -> Mapping[AgentID, tuple[Obs, Info]]:
        if self._closed:
            raise EnvError(f"environment {self.name} was closed, or killed: make a new one")
        if self._process is None:
            self._process = JsonProcess(
                f"{__name__}:serve_env", self._setup, name=f"environment {self.name}"
            )
            if self._closed:  # killed from another thread while it was starting
                self.kill()
        openings = self._ask({"call": "reset", "seed": seed})
        return {agent: (obs, info) for agent, (obs, info) in openings.items()}

    def step(self, actions: Mapping[AgentID, str]) -> Mapping[AgentID, StepOutcome]:
        outcomes = self._ask({"call": "step", "actions": dict(actions)})
        return {agent: StepOutcome(**outcome) for agent, outcome in outcomes.items()}

    def current_obs(self) -> Mapping[AgentID, Obs]:
        return dict(self._seen("current_obs"))

    def suggested_sysprompt(self, agent_id: AgentID) -> str | None:
        prompt: str | None = self._seen("sysprompts").get(agent_id)
        return prompt

    def task_key(self) -> str | None:
        key: str | None = self._seen("task_key")
        return key

    def kill(self) -> None:
        """Ends the process at once, from any thread; whoever waits for it gets an error."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.close()

    def _ask(self, message: Mapping[str, Any]) -> Any:
        if self._process is None or self._closed:
            raise EnvError(f"environment {self.name} is not running: reset it first")
        try:
            # The runner's deadline is usually shorter: it calls `kill`.
            answer = self._process.ask(message, timeout_s=self._timeout_s, what=message["call"])
        except ChildError as error:
            raise EnvError(f"environment {self.name} (in its own process): {error}") from error
        self._state = answer["state"]
        return answer["value"]

    def _seen(self, what: str) -> Any:
        if what not in self._state:
            raise EnvError(f"environment {self.name} runs elsewhere: reset it to know its {what}")
        return self._state[what]


def serve_env(setup: Mapping[str, Any]) -> Answerer:
    """The child's half: builds the environment, then answers for it."""
    with stored_names(setup["stored"]):
        env: LudicEnv[Any, Any, Any] = resolve(setup["factory"])(**setup["kwargs"])
    loop = asyncio.new_event_loop()

    def finish(value: Any) -> Any:
        return loop.run_until_complete(_wait(value)) if inspect.isawaitable(value) else value

    def answer(message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message["call"] == "reset":
            value = finish(env.reset(seed=message["seed"]))
            value = {agent: list(opening) for agent, opening in dict(value).items()}
        else:
            outcomes = dict(finish(env.step(message["actions"])))
            value = {agent: _as_json(outcome) for agent, outcome in outcomes.items()}
        return {"value": value, "state": _state(env)}

    return answer


async def _wait(value: Any) -> Any:
    return await value


def _as_json(outcome: Any) -> Mapping[str, Any]:
    if not isinstance(outcome, StepOutcome):
        raise TypeError(f"step returned a {type(outcome).__name__} instead of a StepOutcome")
    return {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}


def _state(env: LudicEnv[Any, Any, Any]) -> Mapping[str, Any]:
    return {
        "agent_ids": list(env.agent_ids),
        "active_agents": list(env.active_agents),
        "current_obs": dict(env.current_obs()),
        "sysprompts": {agent: env.suggested_sysprompt(agent) for agent in env.agent_ids},
        "task_key": env.task_key(),
        "accepts_partial_actions": bool(env.accepts_partial_actions),
    }


def _reference(kind: str, factory: EnvFactory) -> str:
    module = getattr(factory, "__module__", None)
    name = getattr(factory, "__qualname__", None)
    reference = f"{module}:{name}"
    try:
        found = module not in (None, "__main__") and resolve(reference) is factory
    except (ImportError, AttributeError):
        found = False
    if not found:
        raise ConfigError(
            f"environment {kind!r} cannot run in a separate process: another process cannot "
            f"import {factory!r}; define it at the top of a module that can be imported"
        )
    return reference
