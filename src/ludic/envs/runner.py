"""One way to call every environment: sync or async, blocking or not, in a thread or a process.

Protocols talk to an `EnvRunner`, never to the environment itself: it calls the environment the
way it asks to be called, with a deadline, and checks what comes back.

    runner = EnvRunner(env, step_timeout_s=60)
    try:
        openings = await runner.reset(seed)
        while not runner.done:
            outcomes = await runner.step({agent: … for agent in runner.active_agents})
    finally:
        await runner.close()
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NoReturn, TypeVar

from ludic.envs.env import Killable, LudicEnv
from ludic.envs.outcomes import checked_opening, checked_outcomes
from ludic.errors import ConfigError, DeadlineError, EnvError, LudicError
from ludic.plumbing.text import clean_text, error_text, place_of, words_of
from ludic.types import Action, AgentID, Info, Obs, StepOutcome
from ludic.workers.threads import EnvThreads, is_for_us, shared_threads

T = TypeVar("T")

_GRACE_S = 1.0
"""How long an async environment may take to clean up once its deadline has passed."""

_CLOSE_S = 60.0
_log = logging.getLogger("ludic.envs")


class EnvRunner:
    """Runs the episodes of one environment, one after another.

    `step_timeout_s` bounds each `reset` and each `step` (None: no bound); an environment with
    `blocking = False` is called directly and cannot be interrupted. Whatever goes wrong is an
    `EnvError` or a `DeadlineError` that names the environment and the step; after that the runner
    only closes. All calls come from one event loop, one after another: an environment is never in
    two calls at the same time, even though each may run in another thread.
    """

    def __init__(
        self,
        env: LudicEnv[Any, Any, Any],
        *,
        step_timeout_s: float | None = 60.0,
        threads: EnvThreads | None = None,
    ) -> None:
        self.env = env
        self.name = getattr(env, "name", None) or type(env).__name__
        self.step_timeout_s = step_timeout_s
        self._threads = threads or shared_threads()
        self.agent_ids: tuple[AgentID, ...] = ()
        """Every role of the episode. Known once `reset` returned."""
        self._ended: set[AgentID] = set()
        self._steps = 0
        self._state = "new"
        if env.isolation == "process" and not isinstance(env, Killable):
            raise ConfigError(
                f'environment {self.name} has isolation = "process" but lives in this process: '
                "build it with ludic.envs.build_env(EnvSpec(kind, kwargs))"
            )
        self._reset_in_thread = env.blocking and not _is_async(env, "reset", "env_reset")
        self._step_in_thread = env.blocking and not _is_async(env, "step", "env_step")

    @property
    def done(self) -> bool:
        """Whether the episode has ended for every agent."""
        return len(self._ended) == len(self.agent_ids) and self._state == "running"

    @property
    def active_agents(self) -> tuple[AgentID, ...]:
        """The agents that act in the next step; none when the episode is over."""
        if self.done:
            return ()
        active = self._asked("active_agents", lambda: tuple(self.env.active_agents))
        if active == self.agent_ids and not self._ended:
            return active
        left = [agent for agent in self.agent_ids if agent not in self._ended]
        strays = [agent for agent in active if agent not in left]
        if len(set(active)) != len(active):
            fault = f"names an agent twice: {list(active)}; each acts once in a step"
        elif strays:
            why = "has ended" if strays[0] in self._ended else f"is not in {list(self.agent_ids)}"
            fault = f"names agent {strays[0]!r}, which {why}; name only agents that can still act"
        elif not active:
            fault = (
                f"is empty after step {self._steps}, but the episode has not ended for {left}; "
                "end it for them, or let an agent act"
            )
        else:
            return active
        raise EnvError(f"environment {self.name}: active_agents {fault}")

    @property
    def accepts_partial_actions(self) -> bool:
        """Whether a step may leave out an active agent whose answer could not be parsed."""
        what = "accepts_partial_actions"
        return self._asked(what, lambda: bool(self.env.accepts_partial_actions))

    async def reset(self, seed: int | None = None) -> Mapping[AgentID, tuple[Obs, Info]]:
        """Begins an episode; what each agent first sees."""
        if self._state in ("failed", "abandoned", "closed"):
            raise EnvError(f"environment {self.name} was {self._state}: make a new one")
        self._ended.clear()
        self._steps = 0
        try:
            reset = partial(self.env.reset, seed=seed)
            result = await self._answer(reset, "reset", self._reset_in_thread)
            self.agent_ids = tuple(self.env.agent_ids)
            opening = checked_opening(self.name, self.agent_ids, result)
        except BaseException as error:
            self._fail("reset", error)
        self._state = "running"
        return opening

    async def step(self, actions: Mapping[AgentID, Action]) -> Mapping[AgentID, StepOutcome]:
        """Applies the active agents' actions; an outcome for each that the step concerns."""
        self._check_actions(actions)
        self._steps += 1
        where = f"step {self._steps}"
        try:
            step = partial(self.env.step, dict(actions))  # it may take them out one by one
            result = await self._answer(step, where, self._step_in_thread)
            outcomes = checked_outcomes(
                self.name, where, self.agent_ids, self._ended, actions, result
            )
        except BaseException as error:
            self._fail(where, error)
        for agent, outcome in outcomes.items():
            if outcome.terminated or outcome.truncated:
                self._ended.add(agent)
        return outcomes

    def suggested_sysprompt(self, agent_id: AgentID) -> str | None:
        """The environment's own explanation of the task for `agent_id`."""
        return self._text("suggested_sysprompt", partial(self.env.suggested_sysprompt, agent_id))

    def task_key(self) -> str | None:
        """A stable name of the task that the last `reset` chose."""
        return self._text("task_key", self.env.task_key)

    async def close(self) -> None:
        """Frees the environment; an error of its own is a line in the log. One that hangs is closed
        when it comes back."""
        if self._state in ("closed", "abandoned"):
            return
        self._state = "closed"
        try:
            if getattr(self.env.close, "__func__", None) is LudicEnv.close:
                return  # it has nothing to free
            if self.env.blocking:
                result = await self._threads.run(
                    self.env.close, what="close", whom=self.name, timeout_s=_CLOSE_S
                )
            else:
                result = self.env.close()  # type: ignore[func-returns-value]
            if inspect.isawaitable(result):
                await self._awaited(result, "close")
        except BaseException as error:  # the episode is over: there is nothing left to save
            if is_for_us(error):
                raise
            _warn_of_close(self.name, error)

    def _asked(self, what: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except BaseException as error:
            self._fail(what, error)

    def _text(self, what: str, ask: Callable[[], Any]) -> str | None:
        value = self._asked(what, ask)
        if value is None:
            return None
        if isinstance(value, str):
            return clean_text(value)
        raise EnvError(
            f"environment {self.name}: {what} gave a {type(value).__name__}, {value!r}; give a str "
            "or None"
        )

    def _check_actions(self, actions: Mapping[AgentID, Action]) -> None:
        if self._state != "running":
            raise EnvError(
                f"environment {self.name} was stepped when it was {self._state}; "
                "call reset first, and make a new one after a failure"
            )
        for agent, action in actions.items():
            if not isinstance(action, str):
                raise EnvError(
                    f"environment {self.name} was given {action!r} by agent {agent!r}; "
                    "actions are text"
                )
        active = self.active_agents
        if tuple(actions) == active:
            return
        missing = [agent for agent in active if agent not in actions]
        extra = [agent for agent in actions if agent not in active]
        if extra or not actions or (missing and not self.accepts_partial_actions):
            raise EnvError(
                f"environment {self.name} waits for actions of {list(active)}: "
                f"missing {missing}, out of turn {extra}"
            )

    async def _answer(self, ask: Callable[[], Any], where: str, in_thread: bool) -> Any:
        if in_thread:
            result = await self._threads.run(
                ask,
                what=where,
                whom=f"environment {self.name}",
                timeout_s=self.step_timeout_s,
                on_abandon=self._abandon,
                on_return=lambda: close_env(self.env, self.name),
            )
        else:
            result = ask()
        if type(result) is not dict and inspect.isawaitable(result):
            return await self._awaited(result, where)
        return result

    def _abandon(self) -> None:
        # The thread still works on the environment, so nobody else may touch it from here on, not
        # even to close it: the thread does that itself if it comes back. An environment in a
        # separate process is killed, which brings the thread back at once.
        self._state = "abandoned"
        if isinstance(self.env, Killable):
            self.env.kill()

    async def _awaited(self, result: Awaitable[Any], where: str) -> Any:
        task = asyncio.ensure_future(self._contained(result, where))
        try:
            await asyncio.wait((task,), timeout=self.step_timeout_s)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        await asyncio.wait((task,), timeout=_GRACE_S)
        raise DeadlineError(where, f"environment {self.name}", self.step_timeout_s or 0.0)

    async def _contained(self, result: Awaitable[Any], where: str) -> Any:
        try:
            return await result
        except SystemExit as error:  # in a task it would end the whole event loop
            raise self._error(where, error) from error

    def _fail(self, where: str, error: BaseException) -> NoReturn:
        """After any error the runner only closes. One that does not say so itself is raised with
        the environment and the place."""
        if self._state != "abandoned":
            self._state = "failed"
        if isinstance(error, LudicError) or is_for_us(error):
            raise error
        raise self._error(where, error) from error

    def _error(self, where: str, error: BaseException) -> EnvError:
        place = f" ({at})" if (at := place_of(error)) else ""
        what = f"{type(error).__name__} in {where}: {words_of(error)}{place}"
        return EnvError(f"environment {self.name} raised {what}")


def close_env(env: LudicEnv[Any, Any, Any], name: str | None = None) -> None:
    """Closes an environment from a plain function, or a thread that nobody waits for. An error of
    its own is a line in the log."""
    try:
        result: Any = env.close()  # type: ignore[func-returns-value]
        if inspect.isawaitable(result):
            # A thread, since an event loop may run in this one.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, asyncio.wait_for(result, _CLOSE_S)).result()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _warn_of_close(name or type(env).__name__, error)


def _warn_of_close(name: str, error: BaseException) -> None:
    _log.warning("environment %s was not closed properly: %s", name, error_text(error))


_is_coroutine = lru_cache(256)(inspect.iscoroutinefunction)
"""Of a function that environments have in common: looking takes as long as a small step."""


def _is_async(env: object, *names: str) -> bool:
    for name in names:
        method = getattr(env, name, None)
        function = getattr(method, "__func__", None)
        if _is_coroutine(function) if function else inspect.iscoroutinefunction(method):
            return True
    return False
