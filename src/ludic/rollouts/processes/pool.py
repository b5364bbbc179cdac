"""The processes that play a run's episodes, seen from the process that samples and trains."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Self, cast

from ludic.errors import (
    ConfigError,
    DeadlineError,
    InferenceError,
    RolloutError,
    SerializationError,
)
from ludic.inference.client import ChatClient, QueueingClient, TokenCompletionRequest
from ludic.plumbing.records import changed
from ludic.rollouts.episode_runner import GRACE_S, EpisodeRunner, failed_episode
from ludic.rollouts.processes import messages
from ludic.rollouts.processes.messages import (
    described,
    pack,
    pack_exactly,
    raised_error,
    sent_error,
    unpack,
)
from ludic.rollouts.requests import PlannedEpisode
from ludic.rollouts.storage import EncodedRollouts
from ludic.types import ChatResponse, Rollout
from ludic.workers.child_process import start_child
from ludic.workers.deadlines import deadline
from ludic.workers.frames import Channel
from ludic.workers.threads import contained
from ludic.workers.watched_process import signal_group

_END_S = 15.0
"""How long a process may take to end before it is killed."""
_STATUS_S = 1.0
_BEGIN_S = 300.0
"""How long a process may take to start and to import."""


class _LostEpisode(Exception):
    """An episode that its process could not play to its end, and why."""


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

    async def __aenter__(self) -> Self:
        self._workers = [_Process(self.imports) for _ in range(self.processes)]
        return self

    async def __aexit__(self, *exc: object) -> None:
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
        if not self._workers:
            raise ConfigError("this WorkerPool is not open: use it in `async with`")
        worker = self._worker_for(episode)
        worker.episodes += 1
        try:
            return await worker.play(runner, episode, max_steps, encode)
        except _LostEpisode as lost:
            return failed_episode(episode, max_steps, str(lost))
        finally:
            worker.episodes -= 1

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


class _Process:
    """One process, with what is played there and what it asks for."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process, end = start_child("ludic.rollouts.processes.worker", *imports, **threads)
        self.gone = self._closing = False
        self.episodes = 0
        """How many are under way there, or wait for it."""
        self._loop = asyncio.get_running_loop()
        self._began: asyncio.Future[None] = self._loop.create_future()
        self._numbers = count()
        self._runners: list[EpisodeRunner] = []
        self._clients: list[ChatClient] = []
        self._playing: dict[int, asyncio.Future[list[Rollout]]] = {}
        self._asked: dict[int, Callable[[], object]] = {}
        """By number: what takes a question back."""
        self._channel = Channel(messages.FromWorker, self._take, self._end)
        self._opening = asyncio.create_task(self._channel.open(end))

    async def play(
        self, runner: EpisodeRunner, episode: PlannedEpisode, max_steps: int, encode: bool
    ) -> list[Rollout]:
        """The episode's rollouts. Raises `_LostEpisode`, or what ends the whole call."""
        if not self._began.done():
            await asyncio.wait([self._began], timeout=_BEGIN_S)
            if not self._began.done():
                self.kill()
                raise DeadlineError("its imports", "a process for episodes", _BEGIN_S)
        self._began.result()
        if runner not in self._runners:
            description = described(runner, self._clients)
            self._channel.put(messages.Runner(len(self._runners), description))
            self._runners.append(runner)
        try:
            planned = pack_exactly(episode)
        except SerializationError as exc:
            raise _LostEpisode(f"it cannot be sent to the process that plays it: {exc}") from exc
        number = next(self._numbers)
        outcome: asyncio.Future[list[Rollout]] = self._loop.create_future()
        self._playing[number] = outcome
        place, limit = self._runners.index(runner), runner.episode_timeout_s
        self._channel.put(messages.Play(number, place, planned, max_steps, encode))
        try:
            # The process keeps the episode's deadline itself; this holds when it hangs as a whole.
            with deadline(None if limit is None else limit + 3 * GRACE_S) as bound:
                return await outcome
        except asyncio.CancelledError:
            self._channel.put(messages.Cancel(number))
            raise
        except TimeoutError as exc:
            if not bound.expired:
                raise
            self.kill()
            why = f"the process that played it did not answer within {limit:.3g} s"
            raise _LostEpisode(why) from exc
        finally:
            del self._playing[number]

    def kill(self) -> None:
        """Ends the process and what it started."""
        self.gone = True
        signal_group(self._process.pid, signal.SIGKILL)

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

    def _take(self, message: messages.Message) -> None:
        match message:
            case messages.Ask(number, client, request):
                try:
                    self._ask(number, self._clients[client], request)
                except Exception as exc:  # it cannot be read, or the client refuses it
                    self._channel.put(messages.Answer(number, error=sent_error(exc)))
            case messages.Played(number, rollouts, lines, lost, error):
                if (outcome := self._playing.get(number)) is None or outcome.done():
                    return
                if lost is not None or error is not None:
                    problem = raised_error(error) if error else _LostEpisode(lost)
                    outcome.set_exception(problem)
                    return
                try:
                    read = [unpack(Rollout, rollout) for rollout in rollouts]
                except SerializationError as exc:  # it costs this episode and not the others there
                    outcome.set_exception(_LostEpisode(f"what came back cannot be read: {exc}"))
                else:
                    outcome.set_result(EncodedRollouts(read, lines) if lines else read)
            case messages.Cancel(number):
                self._asked.pop(number, bool)()
            case messages.Ready(problem=None) if not self._began.done():
                self._began.set_result(None)
            case messages.Ready(problem=str(problem)):
                self._refuse(ConfigError(f"a process for episodes: {problem}"))

    def _ask(self, number: int, client: ChatClient, data: bytes) -> None:
        """To a client that queues, the future is all that waits: a task for each question would
        take longer than all the rest."""
        request = unpack(TokenCompletionRequest, data)
        answer: asyncio.Future[ChatResponse] = self._loop.create_future()
        ticket = None
        if hasattr(client, "try_submit"):  # an `isinstance` of the protocol takes longer
            ticket = cast(QueueingClient, client).try_submit(request, answer)
        if ticket is not None:
            self._asked[number] = partial(cast(QueueingClient, client).withdraw, ticket)
        else:
            answer = asyncio.ensure_future(_complete(client, request))
            self._asked[number] = answer.cancel
        answer.add_done_callback(partial(self._answer, number, request))

    def _answer(
        self, number: int, request: TokenCompletionRequest, answer: asyncio.Future[ChatResponse]
    ) -> None:
        """Sends an answer, unless nobody waits for it any more."""
        if self._asked.pop(number, None) is None or answer.cancelled():
            return
        if (error := answer.exception()) is None:
            response, trace = answer.result(), answer.result().trace
            if trace is not None and trace.prompt_token_ids == request.prompt_token_ids:
                # Who asked has the prompt.
                response = changed(response, trace=changed(trace, prompt_token_ids=()))
            try:
                self._channel.put(messages.Answer(number, pack(response)))
            except SerializationError as exc:
                error = exc
        if error is not None:
            self._channel.put(messages.Answer(number, error=sent_error(error)))

    def _refuse(self, error: Exception) -> None:
        """Whoever waits for it to begin hears this, if anybody does."""
        if not self._began.done():
            self._began.set_exception(error)
            self._began.exception()

    def _end(self) -> None:
        self.gone = True
        questions, self._asked = self._asked, {}
        for take_back in questions.values():
            take_back()
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
        for outcome in self._playing.values():
            if not outcome.done():
                outcome.set_exception(_LostEpisode(f"the process that played it {how}"))


async def _complete(client: ChatClient, request: TokenCompletionRequest) -> ChatResponse:
    with contained(InferenceError, "the client"):
        return await client.complete_tokens(request)
