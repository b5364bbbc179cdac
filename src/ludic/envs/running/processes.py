"""Processes for environments, kept from one episode to the next.

Starting a Python costs more than most episodes. A process builds an environment, plays it, closes
it, and is then kept for the next one of the same kind. It is given up instead when anything went
wrong in it, or when the environment left threads or processes behind.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec import structs

from ludic.envs.env import LudicEnv
from ludic.plumbing.lazy import resolve
from ludic.registry import stored_names
from ludic.types import StepOutcome
from ludic.workers.json_process import Answerer, JsonProcess

MAX_IDLE = 64
"""How many processes are kept while no environment needs them."""

Surroundings: TypeAlias = tuple[Any, ...]


class EnvProcesses:
    """The idle processes, by what they serve. Any thread may take one or bring one back."""

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self.max_idle = max_idle
        self._lock = threading.Lock()
        self._idle: list[tuple[Surroundings, JsonProcess]] = []  # the longest unused first

    def take(self, factory: str, *, name: str) -> JsonProcess:
        """A process that has served this factory before and is alive; else a new one."""
        wanted = _surroundings(factory)
        dead = []
        try:
            with self._lock:
                for place in reversed(range(len(self._idle))):
                    surroundings, process = self._idle[place]
                    if surroundings == wanted:
                        del self._idle[place]
                        if process.is_alive:
                            process.name = name
                            return process
                        dead.append(process)
        finally:
            for process in dead:
                process.close()
        return JsonProcess(f"{__name__}:serve_envs", None, name=name)

    def bring_back(self, factory: str, process: JsonProcess) -> None:
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
    """What a new process would be started with: where that differs, an old one is another."""
    environment = tuple(sorted(os.environ.items()))
    return (factory, os.getpid(), os.getcwd(), tuple(sys.path), environment)


_shared = EnvProcesses()
atexit.register(_shared.close)


def shared_processes() -> EnvProcesses:
    """The processes that all environments of this program share."""
    return _shared


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
        if message["call"] == "reset":
            value = self._finish(env.reset(seed=message["seed"]))
            value = {agent: list(opening) for agent, opening in dict(value).items()}
        else:
            outcomes = dict(self._finish(env.step(message["actions"])))
            value = {agent: _as_json(outcome) for agent, outcome in outcomes.items()}
        return {"value": value, "state": _state(env)}

    def close(self) -> None:
        self._finish(self._env.close())  # type: ignore[func-returns-value]
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _finish(self, value: Any) -> Any:
        return self._loop.run_until_complete(_wait(value)) if inspect.isawaitable(value) else value


async def _wait(value: Any) -> Any:
    return await value


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


def _as_json(outcome: Any) -> Mapping[str, Any]:
    if not isinstance(outcome, StepOutcome):
        raise TypeError(f"step returned a {type(outcome).__name__} instead of a StepOutcome")
    return structs.asdict(outcome)


def _state(env: LudicEnv[Any, Any, Any]) -> Mapping[str, Any]:
    return {
        "agent_ids": list(env.agent_ids),
        "active_agents": list(env.active_agents),
        "current_obs": dict(env.current_obs()),
        "sysprompts": {agent: env.suggested_sysprompt(agent) for agent in env.agent_ids},
        "task_key": env.task_key(),
        "accepts_partial_actions": bool(env.accepts_partial_actions),
    }
