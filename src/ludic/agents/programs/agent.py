"""An agent that is a program: it asks the model by the chat completions API, as often as it likes.

The program is a command or a function, written for any OpenAI-compatible address. It is started
with an address and a key of its own, and ended with the turn; what the model said to it is recorded
token by token.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ludic.agents.base_agent import ActResult, Agent
from ludic.agents.programs.processes import Ended, environment, run_process
from ludic.agents.programs.session import Session
from ludic.errors import AgentError, ConfigError, DeadlineError
from ludic.plumbing.lazy import names_are_stored
from ludic.plumbing.text import clean_text, error_text
from ludic.registry import PROGRAMS
from ludic.types import AgentStep, Message, TruncationReason
from ludic.workers.threads import is_for_us, shared_threads

ProgramFunction: TypeAlias = Callable[..., Any | Awaitable[Any]]
"""Called as `function(task, base_url=…, api_key=…)`; it returns its answer as text, or None."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What a program left: its answer (what it printed, or returned), how it ended, and its model
    calls. `status` is None where it was ended at its deadline (`timed_out`); a function that
    raised has the status 1, and the error in `stderr`."""

    answer: str
    status: int | None
    stdout: str = ""
    stderr: str = ""
    steps: tuple[AgentStep, ...] = ()
    messages: tuple[Message, ...] = ()
    """The last conversation with the model, its answer included."""
    cut: TruncationReason | None = None
    """Which limit the last request was refused for: the context's, or that of `max_calls`."""
    undelivered: int = 0
    """Answers that nobody got, because the connection was cut."""
    failures: tuple[str, ...] = ()
    """What was wrong whenever the backend failed."""

    @property
    def timed_out(self) -> bool:
        return self.status is None


@dataclass(eq=False, repr=False, kw_only=True)
class ProgramAgent(Agent):
    """Starts the program for each turn, with what the environment said last as its task.

    The task is the program's standard input, and stands for `{task}` among the command's arguments.
    `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL` are in its environment, and
    `LUDIC_SYSTEM_PROMPT` if there is one. What it prints is the answer, which the parser reads. A
    status other than 0, a deadline, or no request at all costs the episode; a program that gives up
    since its context or `max_calls` is used up ends it with that truncation.

    Args:
        command: The program and its arguments. Nothing goes through a shell.
        function: Or a function, or its place (`module:function`): async, or run in a thread.
        cwd: The folder that a command is started in.
        env: Variables for it, besides a few harmless ones of this process.
        pass_env: Names of this process's variables to hand on.
        timeout_s: How long it may take. A function in a thread cannot be ended, only left alone.
        max_calls: How many model calls it may make.
    """

    command: Sequence[str] = ()
    function: str | ProgramFunction | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: Sequence[str] = ()
    timeout_s: float = 300.0
    max_calls: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if names_are_stored():
            raise ConfigError(
                "stored data names a program, and none is started for it: it cannot be replayed"
            )
        if bool(self.command) == (self.function is not None):
            raise ConfigError("a program is either a `command` or a `function`: give one of them")
        if isinstance(self.command, str):
            raise ConfigError(f'command = "{self.command}": give a list of program and arguments')
        for name in ("timeout_s", "max_calls"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        if missing := [name for name in self.pass_env if name not in os.environ]:
            raise ConfigError(f"pass_env: the variables {missing} are not set")
        if isinstance(self.function, str):
            self.function = PROGRAMS.get(self.function)
        if self.command:
            _check_command(self.command, self.cwd, environment(self.env, self.pass_env)["PATH"])
        self._session: Session | None = None
        self._prompt_given: str | None = None

    @property
    def label(self) -> str:
        """What messages call the program."""
        if self.function is not None:
            return f"program {getattr(self.function, '__name__', self.function)!r}"
        return f"program {' '.join([Path(self.command[0]).name, *self.command[1:]])[:80]!r}"

    def reset(self, system_prompt: str | None = None, **options: Any) -> None:
        super().reset(system_prompt, **options)
        self._prompt_given = self.system_prompt if system_prompt is None else system_prompt
        self._session = Session(
            self.client,
            self.model,
            self.chat_template,
            inference=self.inference,
            request_timeout_s=self.request_timeout_s,
            max_calls=self.max_calls,
            **options,
        )

    async def act(self) -> ActResult:
        """Runs the program once, and reads its answer."""
        return self.read(await self.run_program())

    async def run_program(self) -> ProgramResult:
        """Runs the program once. However it ends is in the result; only what cannot be started
        raises."""
        self.begin_turn()
        if self._session is None:
            self.reset()
        session, task = self._session, self._task()
        assert session is not None
        from ludic.agents.programs.server import ChatServer  # with it comes an HTTP server

        async with ChatServer() as server:
            server.open(session)
            try:
                run = self._run_command if self.function is None else self._call_function
                ended = await run(task, server.url, session.key)
            finally:
                await server.close(session)
                self._steps.extend(session.take_steps(self._turn))
        answer = ended.stdout.strip() if ended.status == 0 else ""
        self.ctx.on_after_act({"role": "assistant", "content": answer})
        return ProgramResult(
            answer,
            ended.status,
            ended.stdout,
            ended.stderr,
            self.steps_of_turn,
            session.conversation(),
            session.cut,
            session.undelivered,
            tuple(session.failures),
        )

    def _task(self) -> str:
        """What the environment, or the parser, said last."""
        messages = self.ctx.on_before_act()
        return messages[-1]["content"] if messages and messages[-1]["role"] == "user" else ""

    def read(self, result: ProgramResult) -> ActResult:
        """The turn that a program's run was. Raises for one that failed."""
        if result.status != 0 and result.cut is not None and result.steps:
            return ActResult(result.steps, self.no_answer(), result.cut)
        if error := self.failure_of(result):
            raise error
        return ActResult(result.steps, self.parser(result.answer))

    def failure_of(self, result: ProgramResult) -> Exception | None:
        """What went wrong with a run, in words, if anything did."""
        if result.timed_out:
            return DeadlineError("its end", self.label, self.timeout_s)
        why = f"; the backend had failed: {result.failures[-1]}" if result.failures else ""
        output = f": {result.stderr.strip()[-500:]}" if result.stderr.strip() else ""
        if not result.steps:
            ended = f"it ended with status {result.status}{output}{why}"
            return AgentError(f"{self.label} got no answer from the model; {ended}")
        if result.status != 0:
            return AgentError(f"{self.label} ended with status {result.status}{output}{why}")
        return None

    async def _run_command(self, task: str, url: str, key: str) -> Ended:
        variables = {**self.env, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        variables["OPENAI_MODEL"] = self.model
        if self._prompt_given is not None:
            variables["LUDIC_SYSTEM_PROMPT"] = self._prompt_given
        try:
            return await run_process(
                [argument.replace("{task}", task) for argument in self.command],
                stdin=task,
                env=environment(variables, self.pass_env),
                cwd=self.cwd,
                mark=key,
                timeout_s=self.timeout_s,
            )
        except (OSError, ValueError) as exc:  # too long, or with a character that none may have
            raise AgentError(f"{self.label} cannot be started: {exc}") from exc

    async def _call_function(self, task: str, url: str, key: str) -> Ended:
        function = self.function
        assert callable(function)

        def call() -> Any:
            return function(task, base_url=url, api_key=key)

        async def answer() -> Any:
            if inspect.iscoroutinefunction(function):
                return await call()
            result = await shared_threads().run(
                call, what="its end", whom=self.label, timeout_s=self.timeout_s
            )
            return await result if inspect.isawaitable(result) else result

        try:
            async with asyncio.timeout(self.timeout_s) as over:
                answered = await answer()
        except BaseException as exc:
            if is_for_us(exc):
                raise
            if over.expired() or isinstance(exc, DeadlineError):
                return Ended(None, "", "")
            return Ended(1, "", error_text(exc))
        return Ended(0, "" if answered is None else clean_text(str(answered)), "")


def _check_command(command: Sequence[str], cwd: str | None, path: str) -> None:
    if not all(isinstance(argument, str) for argument in command):
        raise ConfigError(f"command = {list(command)}: give a list of strings")
    if cwd is not None and not os.path.isdir(cwd):
        raise ConfigError(f"cwd = {cwd!r}: there is no such folder")
    program = command[0]
    if os.sep in program:
        exists = os.access(Path(cwd or ".", program), os.X_OK)
    else:
        exists = shutil.which(program, path=path) is not None
    if not exists:
        raise ConfigError(f"command = {list(command)}: there is no program {program!r}")
