"""Environments in separate processes, which can be killed when they hang.

Starting a Python costs more than most episodes. A process builds an environment, plays it, closes
it, and is then kept for the next one of the same kind. It is given up instead when anything went
wrong in it, or when the environment left threads or processes behind.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from ludic.envs.env import LudicEnv
from ludic.errors import ConfigError, DeadlineError, EnvError
from ludic.plumbing.given import place_of
from ludic.plumbing.lazy import resolve
from ludic.registry import ENVS, make_env, names_are_stored, stored_names
from ludic.types import AgentID, EnvSpec, Info, Obs, StepOutcome
from ludic.workers.child_process import Answerer, ChildError, ChildProcess

_CLOSE_S, _LONGEST_S = 30.0, 3600.0
_OUTCOME = tuple(inspect.signature(StepOutcome).parameters)
MAX_IDLE = 64
"""How many processes are kept while no environment needs them."""

Surroundings: TypeAlias = tuple[Any, ...]
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
    kwargs = own_kwargs(spec)
    env = factory(**kwargs) if factory else make_env(spec.kind, **kwargs)
    if isolation is None and env.isolation == "process" and not isinstance(env, ProcessEnv):
        env.close()  # made by a function, it says only now that it wants to live elsewhere
        return ProcessEnv(spec, factory)
    return env


def own_kwargs(spec: EnvSpec) -> dict[str, Any]:
    """The arguments for one environment, which may shuffle the lists that it is given, or add to
    them. What is in them is shared, since it may be a whole dataset."""
    return {k: v.copy() if type(v) in (list, dict) else v for k, v in spec.kwargs.items()}


class ProcessEnv(LudicEnv[AgentID, Obs, str]):
    """Stands for an environment that is built and run in another process.

    Only plain values cross over: the spec's arguments, actions, and outcomes. The child imports the
    factory (by default the one registered as `spec.kind`) by its module and name, so that one
    made in a notebook or as a lambda cannot be isolated. A process is started, or taken from an
    environment that was closed, with the first `reset`; a runner's deadline kills it. What the
    environment raises arrives as an `EnvError`, after which its process is not used again.

    One worker thread at a time calls `reset`, `step` and `close`; only `kill` may come from another
    thread meanwhile. It sets `_killed` before it looks for a process, and `reset` looks at it
    again after it has one: whichever comes first, the child does not outlive the kill.
    """

    isolation: ClassVar[Literal["thread", "process"]] = "process"

    def __init__(self, spec: EnvSpec, factory: EnvFactory | None = None) -> None:
        self.name = spec.kind
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
        self._process: ChildProcess | None = None
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
        self._begin()
        openings = self._ask({"call": "reset", "seed": seed})
        return {agent: (obs, info) for agent, (obs, info) in openings.items()}

    def step(self, actions: Mapping[AgentID, str]) -> Mapping[AgentID, StepOutcome]:
        outcomes = self._ask({"call": "step", "actions": dict(actions)})
        return {agent: StepOutcome(**outcome) for agent, outcome in outcomes.items()}

    def current_obs(self) -> Mapping[AgentID, Obs]:
        return dict(self._seen("current_obs"))

    def picture(self) -> str | None:
        picture: str | None = self._ask({"call": "picture"})
        return picture

    def check_machine(self) -> None:
        """Builds the environment in its process, which finds out what is missing."""
        self._begin()
        self._exchange({"call": "check_machine"})

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
            _shared.bring_back(self._setup["factory"], process)
        else:
            process.close()

    def _begin(self) -> None:
        """Has the environment built in a process, once."""
        if self._process is None:
            self._process = _shared.take(self._setup["factory"], name=f"environment {self.name}")
            if self._killed:  # from another thread, while it was starting
                self.kill()
            self._exchange({"call": "build", **self._setup})

    def _is_left_clean(self, process: ChildProcess) -> bool:
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
            return self._process.ask(message, timeout_s=_LONGEST_S, what=message["call"])
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
    if (place := place_of(factory)) is None:
        raise ConfigError(
            f"environment {kind!r} cannot run in a separate process: another process cannot "
            f"import {factory!r}; define it at the top of a module that can be imported"
        )
    return place


class EnvProcesses:
    """The idle processes, by what they serve. Any thread may take one or bring one back."""

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self.max_idle = max_idle
        self._lock = threading.Lock()
        self._idle: list[tuple[Surroundings, ChildProcess]] = []  # the longest unused first

    def take(self, factory: str, *, name: str) -> ChildProcess:
        """A process that has served this factory before and is alive; else a new one."""
        wanted = _surroundings(factory)
        while True:
            with self._lock:
                fitting = [i for i, (its, _) in enumerate(self._idle) if its == wanted]
                if not fitting:
                    break
                _, process = self._idle.pop(fitting[-1])
            if process.is_alive:
                process.name = name
                return process
            process.close()
        return ChildProcess(f"{__name__}:serve_envs", None, name=name)

    def bring_back(self, factory: str, process: ChildProcess) -> None:
        """Keeps a process whose environment was closed and left nothing behind."""
        with self._lock:
            self._idle.append((_surroundings(factory), process))
            spare = self._idle[: max(len(self._idle) - self.max_idle, 0)]
            del self._idle[: len(spare)]
        for _, unused in spare:
            unused.close()

    def close(self) -> None:
        """Ends all that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, process in idle:
            process.close()


def _surroundings(factory: str) -> Surroundings:
    """What a new process would be started with; an old one that had something else will not do."""
    environment = tuple(sorted(os.environ.items()))
    return (factory, os.getpid(), os.getcwd(), tuple(sys.path), environment)


_shared = EnvProcesses()
"""The processes that all environments of this program share."""
atexit.register(_shared.close)


def serve_envs(_: None) -> Answerer:
    """The child's half: builds an environment, answers for it, closes it, and takes the next."""
    served: _Served | None = None
    home = os.getcwd()

    def answer(message: Mapping[str, Any]) -> Any:
        nonlocal served
        if message["call"] == "build":
            served = _Served(message)
            return None
        assert served is not None
        if message["call"] == "close":
            served.close()
            served = None
            return os.getcwd() == home and _left_nothing_behind()
        return served.answer(message)

    return answer


class _Served:
    """One environment, and the event loop of its `async` methods."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        with stored_names(setup["stored"]):
            env: LudicEnv[Any, Any, Any] = resolve(setup["factory"])(**setup["kwargs"])
        self._env = env
        self._loop = asyncio.new_event_loop()

    def answer(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        env = self._env
        if message["call"] == "check_machine":
            env.check_machine()
            return {}
        if message["call"] == "picture":
            return {"value": env.picture(), "state": _state(env)}
        if message["call"] == "reset":
            value = self._finish(env.reset(seed=message["seed"]))
            value = {agent: list(opening) for agent, opening in dict(value).items()}
        else:
            outcomes = dict(self._finish(env.step(message["actions"])))
            value = {agent: _fields(outcome) for agent, outcome in outcomes.items()}
        return {"value": value, "state": _state(env)}

    def close(self) -> None:
        self._finish(self._env.close())  # type: ignore[func-returns-value]
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _finish(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


def _left_nothing_behind() -> bool:
    """Whether no child process is left, and no thread that would keep a program from ending."""
    main = threading.main_thread()
    if any(not thread.daemon and thread is not main for thread in threading.enumerate()):
        return False
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass  # it had ended
    except ChildProcessError:
        return True
    return False


def _fields(outcome: Any) -> Mapping[str, Any]:
    if not isinstance(outcome, StepOutcome):
        raise TypeError(f"step returned a {type(outcome).__name__} instead of a StepOutcome")
    return {name: getattr(outcome, name) for name in _OUTCOME}


def _state(env: LudicEnv[Any, Any, Any]) -> Mapping[str, Any]:
    return {
        "agent_ids": list(env.agent_ids),
        "active_agents": list(env.active_agents),
        "current_obs": dict(env.current_obs()),
        "sysprompts": {agent: env.suggested_sysprompt(agent) for agent in env.agent_ids},
        "task_key": env.task_key(),
        "accepts_partial_actions": bool(env.accepts_partial_actions),
    }
