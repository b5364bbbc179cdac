"""An environment in a separate process, which can be killed when it hangs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from ludic.envs.env import LudicEnv
from ludic.envs.running.processes import shared_processes
from ludic.errors import ConfigError, DeadlineError, EnvError
from ludic.plumbing.lazy import resolve
from ludic.registry import ENVS, make_env, names_are_stored
from ludic.types import AgentID, EnvSpec, Info, Obs, StepOutcome
from ludic.workers.json_process import ChildError, JsonProcess

_CLOSE_S = 30.0

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
    made in a notebook or as a lambda cannot be isolated. A process is started, or taken from an
    environment that was closed, with the first `reset`; a runner's deadline kills it. What the
    environment raises arrives as an `EnvError`, after which its process is not used again.

    One worker thread at a time calls `reset`, `step` and `close`; only `kill` may come from another
    thread meanwhile. It sets `_killed` before it looks for a process, and `reset` looks at it
    again after it has one: whichever comes first, the child does not outlive the kill.
    """

    isolation: ClassVar[Literal["thread", "process"]] = "process"

    def __init__(
        self, spec: EnvSpec, factory: EnvFactory | None = None, *, timeout_s: float = 3600.0
    ) -> None:
        self.name = spec.kind
        self._timeout_s = timeout_s
        self._setup: dict[str, Any] = {
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
        self._closed = self._killed = self._failed = False
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
            self._process = shared_processes().take(
                self._setup["factory"], name=f"environment {self.name}"
            )
            if self._killed:  # from another thread, while it was starting
                self.kill()
            self._exchange({"call": "build", **self._setup})
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
        self._closed = self._killed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        self._closed = True
        process, self._process = self._process, None
        if process is None:
            return
        if not (self._killed or self._failed) and self._is_left_clean(process):
            shared_processes().bring_back(self._setup["factory"], process)
        else:
            process.close()

    def _is_left_clean(self, process: JsonProcess) -> bool:
        try:
            return process.ask({"call": "close"}, timeout_s=_CLOSE_S, what="close") is True
        except (ChildError, DeadlineError):
            return False

    def _ask(self, message: Mapping[str, Any]) -> Any:
        answer = self._exchange(message)
        self._state = answer["state"]
        return answer["value"]

    def _exchange(self, message: Mapping[str, Any]) -> Any:
        if self._process is None or self._closed:
            raise EnvError(f"environment {self.name} is not running: reset it first")
        try:
            # The runner's deadline is usually shorter: it calls `kill`.
            return self._process.ask(message, timeout_s=self._timeout_s, what=message["call"])
        except (ChildError, DeadlineError) as error:
            self._failed = True
            if isinstance(error, DeadlineError):
                raise
            raise EnvError(f"environment {self.name} (in its own process): {error}") from error

    def _seen(self, what: str) -> Any:
        if what not in self._state:
            raise EnvError(f"environment {self.name} runs elsewhere: reset it to know its {what}")
        return self._state[what]


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
