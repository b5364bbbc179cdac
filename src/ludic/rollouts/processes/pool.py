"""The processes that play a run's episodes, seen from the process that samples and trains."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Self, cast

from ludic.errors import (
    ConfigError,
    DeadlineError,
    InferenceError,
    LudicError,
    RolloutError,
    SerializationError,
)
from ludic.inference.client import ChatClient, QueueingClient, TokenCompletionRequest
from ludic.plumbing.records import changed
from ludic.rollouts.episode_runner import GRACE_S, EpisodeRunner, failed_episode
from ludic.rollouts.planning import PlannedEpisode
from ludic.rollouts.processes.channel import Channel, Message, raised_error, sent_error
from ludic.rollouts.processes.description import described
from ludic.rollouts.storage import EncodedRollouts
from ludic.types import ChatResponse, Rollout, from_json, to_json
from ludic.workers.deadlines import deadline
from ludic.workers.escapes import contained

_END_S = 15.0
"""How long a process may take to end before it is killed."""
_STATUS_S = 1.0
_BEGIN_S = 300.0
"""How long a process may take to start and to import."""


class WorkerPool:
    """Plays episodes in `processes` processes, which ask this one's clients for completions.

    For `RolloutEngine(workers=...)`. Environments, protocols, parsers and templates then run
    there, on as many cores, and only sampling, credit and training in this process. What episodes
    are made of is built there, so names must be known there: `imports` are modules that register
    them, and factories must be importable. What is defined in a script itself is not.

    A process that ends takes its episodes with it: they come back as failed, and another one is
    started for the next. Use the pool as an async context manager; its processes start at once and
    import while other things are made ready.
    """

    def __init__(self, processes: int, *, imports: Sequence[str] = ()) -> None:
        if processes < 1:
            raise ConfigError(f"WorkerPool: processes={processes}: must be at least 1")
        self.processes, self.imports = processes, tuple(imports)
        self._workers: list[_Process] = []
        self._last: tuple[str | None, int] = (None, 0)
        self._runners: list[EpisodeRunner] = []
        self._opened = False

    async def __aenter__(self) -> Self:
        self._workers = [_Process(self.imports) for _ in range(self.processes)]
        self._opened = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._opened = False
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.close() for worker in workers))

    async def play(
        self,
        runner: EpisodeRunner,
        episode: PlannedEpisode,
        max_steps: int,
        *,
        encode: bool = False,
    ) -> list[Rollout]:
        """What `runner.run(episode, max_steps)` returns, played in one of the processes. With
        `encode`, they are encoded for a file there, too."""
        if not self._opened:
            raise ConfigError("this WorkerPool is not open: use it in `async with`")
        worker = self._worker_for(episode)
        limit = runner.episode_timeout_s
        worker.episodes += 1
        try:
            if not worker.is_ready:
                await worker.ready()
            # The process keeps the episode's deadline itself; this holds when it hangs as a whole.
            with deadline(None if limit is None else limit + 3 * GRACE_S):
                number = self._number_of(runner)
                outcome = await worker.play(number, runner, episode, max_steps, encode)
        except DeadlineError:
            raise
        except TimeoutError:
            worker.kill()
            outcome = f"the process that played it did not answer within {limit:.3g} s"
        finally:
            worker.episodes -= 1
        if isinstance(outcome, str):
            return failed_episode(episode, max_steps, outcome)
        return outcome

    def _worker_for(self, episode: PlannedEpisode) -> _Process:
        """The same for a group's members, one after the other, since they share their prompts; the
        one with the fewest episodes for the next."""
        group, place = self._last
        if episode.group_id is None or episode.group_id != group:
            place = min(range(self.processes), key=lambda i: self._workers[i].episodes)
            self._last = episode.group_id, place
        if self._workers[place].gone:
            self._workers[place] = _Process(self.imports)
        return self._workers[place]

    def _number_of(self, runner: EpisodeRunner) -> int:
        if runner not in self._runners:
            self._runners.append(runner)
        return self._runners.index(runner)


class _Process:
    """One process, with what is played there and what it asks for."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ludic.rollouts.processes.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # so that killing it takes its own children along
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "OMP_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )
        self.gone = self.is_ready = self._closing = False
        self.episodes = 0
        """How many are under way there, or wait for it."""
        self._began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._numbers = count()
        self._known: set[int] = set()
        self._clients: list[ChatClient] = []
        self._playing: dict[int, asyncio.Future[list[Rollout] | str]] = {}
        self._asked: dict[int, _Question] = {}
        self._channel = Channel(self._take, self._end)
        self._channel.put("begin", imports)
        self._opening = asyncio.create_task(self._channel.open(ours))

    async def ready(self) -> None:
        """Returns when the process has imported what it needs; raises if it cannot."""
        done, _ = await asyncio.wait([self._began], timeout=_BEGIN_S)
        if not done:
            self.kill()
            raise DeadlineError("its imports", "a process for episodes", _BEGIN_S)
        self._began.result()

    async def play(
        self,
        number: int,
        runner: EpisodeRunner,
        episode: PlannedEpisode,
        max_steps: int,
        encode: bool,
    ) -> list[Rollout] | str:
        """The episode's rollouts, or how it was lost."""
        if number not in self._known:
            self._channel.put("runner", number, described(runner, self._clients))
            self._known.add(number)
        try:
            planned = to_json(episode)
        except SerializationError as exc:
            return f"it cannot be sent to the process that plays it: {exc}"
        place = next(self._numbers)
        outcome: asyncio.Future[list[Rollout] | str] = asyncio.get_running_loop().create_future()
        self._playing[place] = outcome
        self._channel.put("play", place, number, planned, max_steps, encode)
        try:
            return await outcome
        except asyncio.CancelledError:
            self._channel.put("stop", place)
            raise
        finally:
            self._playing.pop(place, None)

    def kill(self) -> None:
        """Ends the process and what it started."""
        self.gone = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Lets the process end, and kills it if it does not."""
        with suppress(OSError):
            await self._opening
        self._closing = True
        self._began.cancel()  # nobody waits for it any more
        self._channel.close()
        try:
            await asyncio.to_thread(self._process.wait, _END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            await asyncio.to_thread(self._process.wait)

    def _take(self, message: Message) -> None:
        match message:
            case ("ask", number, client, request):
                try:
                    asked = from_json(TokenCompletionRequest, request)
                except LudicError as exc:
                    self._channel.put("error", number, *sent_error(exc))
                    return
                self._ask(number, self._clients[client], asked)
            case ("played", place, rollouts, lines):
                try:
                    found = [from_json(Rollout, rollout) for rollout in rollouts]
                except LudicError as exc:  # it costs this episode and not the others there
                    self._settle(place, f"what came back from it cannot be read: {exc}")
                    return
                self._settle(place, EncodedRollouts(found, lines) if lines else found)
            case ("lost", place, why):
                self._settle(place, why)
            case ("failed", place, kind, text):
                if (outcome := self._playing.get(place)) is not None and not outcome.done():
                    outcome.set_exception(raised_error(kind, text))
            case ("withdraw", number):
                if (question := self._asked.pop(number, None)) is not None:
                    question.cancel()
            case ("ready",):
                self.is_ready = True
                if not self._began.done():
                    self._began.set_result(None)
            case ("broken", text):
                self._refuse(ConfigError(f"a process for episodes: {text}"))

    def _ask(self, number: int, client: ChatClient, request: TokenCompletionRequest) -> None:
        question = _Question(self, number, request)
        self._asked[number] = question
        try:
            # Asking for a `QueueingClient` takes longer than the rest.
            queues = hasattr(client, "try_submit")
            if not (queues and question.queued(cast(QueueingClient, client))):
                question.wait(client)
        except Exception as exc:
            question.set_exception(exc)

    def answered(self, number: int, *message: Any) -> None:
        """Sends an answer, unless nobody waits for it any more."""
        if self._asked.pop(number, None) is not None:
            self._channel.put(*message)

    def _settle(self, place: int, result: list[Rollout] | str) -> None:
        if (outcome := self._playing.get(place)) is not None and not outcome.done():
            outcome.set_result(result)

    def _refuse(self, error: Exception) -> None:
        """Whoever waits for it to begin hears this, if anybody does."""
        if not self._began.done():
            self._began.set_exception(error)
            self._began.exception()

    def _end(self) -> None:
        self.gone = True
        for question in self._asked.values():
            question.cancel()
        self._asked.clear()
        if self._closing:
            return
        try:
            # The socket of a process that is killed closes a moment before there is a status.
            how = f"ended with {self._process.wait(_STATUS_S)}"
        except subprocess.TimeoutExpired:
            how = "closed its connection"
            self.kill()
        why = f"a process for episodes {how} before it began: see what it printed"
        self._refuse(RolloutError(why))
        for place in list(self._playing):
            self._settle(place, f"the process that played it {how}")


class _Question:
    """A request of a process. To a client that queues, it is the one who waits for the answer: a
    task for each would take longer than all the rest."""

    def __init__(self, process: _Process, number: int, request: TokenCompletionRequest) -> None:
        self._process, self._number, self._request = process, number, request
        self._loop = asyncio.get_running_loop()
        self._taken_back: Callable[[], object] = lambda: None

    def queued(self, client: QueueingClient) -> bool:
        """Whether the client took it; if not, it has no room."""
        ticket = client.try_submit(self._request, self)
        if ticket is not None:
            self._taken_back = partial(client.withdraw, ticket)
        return ticket is not None

    def wait(self, client: ChatClient) -> None:
        """Asks with a coroutine that waits."""
        task = asyncio.ensure_future(self._complete(client))
        self._taken_back = task.cancel

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self._taken_back()

    async def _complete(self, client: ChatClient) -> None:
        try:
            with contained(InferenceError, "the client"):
                self.set_result(await client.complete_tokens(self._request))
        except Exception as exc:
            self.set_exception(exc)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def done(self) -> bool:
        return False  # what is not wanted any more is left out when it is to be sent

    def set_result(self, response: ChatResponse, /) -> None:
        number = self._number
        try:
            answer = to_json(_without_prompt(response, self._request))
        except SerializationError as exc:
            self.set_exception(exc)
            return
        self._process.answered(number, "answer", number, answer)

    def set_exception(self, error: BaseException, /) -> None:
        number = self._number
        self._process.answered(number, "error", number, *sent_error(error))


def _without_prompt(response: ChatResponse, request: TokenCompletionRequest) -> ChatResponse:
    """The response without the prompt, if it is the request's: who asked has that."""
    trace = response.trace
    if trace is None or trace.prompt_token_ids != request.prompt_token_ids:
        return response
    return changed(response, trace=changed(trace, prompt_token_ids=()))
