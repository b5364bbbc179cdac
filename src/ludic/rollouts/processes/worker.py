"""A process that plays episodes: `python -m ludic.rollouts.processes.worker MODULE… FD`.

It samples nothing itself: its clients ask the process that started it. It imports the modules
first, and ends when the socket with that number does.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any, TypeVar

from ludic.agents.mcp import tool_servers
from ludic.errors import (
    ConfigError,
    LudicError,
    NotTrainableError,
    SerializationError,
)
from ludic.inference.client import TokenCompletionRequest
from ludic.plumbing.records import changed
from ludic.plumbing.text import error_text, words_of
from ludic.rollouts.episode_runner import EpisodeRunner
from ludic.rollouts.processes import messages
from ludic.rollouts.processes.messages import (
    made,
    pack,
    pack_exactly,
    raised_error,
    sent_error,
    unpack,
)
from ludic.rollouts.requests import PlannedEpisode
from ludic.rollouts.storage import rollout_line
from ludic.types import ChatResponse
from ludic.workers.deadlines import bounded
from ludic.workers.frames import Channel

T = TypeVar("T")

_CLEAN_UP_S = 10.0
"""How long episodes that are cut off may take to close what they opened."""
_KEPT_SPECS = 64


class RemoteClient:
    """Stands for a client of the process that this one works for."""

    keeps_deadlines = True

    def __init__(self, worker: Worker, number: int, max_context_tokens: int | None) -> None:
        self._worker, self._number = worker, number
        self.max_context_tokens = max_context_tokens

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        """Asks there; an error from there is raised here."""
        answer = self._worker.ask(self._number, request)
        whom = "the process that samples"
        response = await bounded(answer, "a completion", whom, request.timeout_s)
        trace = response.trace
        if trace is not None and not trace.prompt_token_ids:  # which is known here
            trace = changed(trace, prompt_token_ids=request.prompt_token_ids)
            response = changed(response, trace=trace)
        return response

    async def sync_weights(self, *_: Any, **__: Any) -> str:
        """Refuses: weights are the other process's business."""
        raise NotTrainableError("a process that plays episodes has no weights to change")


class Worker:
    """Plays what it is sent, all at the same time."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._channel = Channel(messages.ToWorker, self._take, self._ended.set)
        self._runners: dict[int, EpisodeRunner | ConfigError] = {}
        self._specs: dict[bytes, Any] = {}
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[ChatResponse]] = {}

    async def work(self, end: socket.socket, modules: Sequence[str]) -> None:
        """Until the other end is gone."""
        async with tool_servers():
            await self._channel.open(end)
            self._channel.put(messages.Ready(0, _imported(modules)))
            await self._ended.wait()
            if left := list(self._episodes.values()):
                for task in left:
                    if not task.cancelling():  # a second time would interrupt its cleaning up
                        task.cancel()
                await asyncio.wait(left, timeout=_CLEAN_UP_S)

    def ask(self, client: int, request: TokenCompletionRequest) -> asyncio.Future[ChatResponse]:
        """The answer to come; cancelling it takes the question back."""
        number = next(self._numbers)
        answer: asyncio.Future[ChatResponse] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        answer.add_done_callback(lambda done: self._forget(number, done))
        try:
            self._channel.put(messages.Ask(number, client, pack(request)))
        except SerializationError as exc:
            answer.set_exception(exc)
        return answer

    def _forget(self, number: int, answer: asyncio.Future[ChatResponse]) -> None:
        del self._asked[number]
        if answer.cancelled():
            self._channel.put(messages.Cancel(number))

    def _take(self, message: messages.Message) -> None:
        match message:
            case messages.Answer(number, response, error):
                if (answer := self._asked.get(number)) is None or answer.done():
                    return
                try:
                    if error is not None:
                        raise raised_error(error)
                    answer.set_result(unpack(ChatResponse, response))
                except LudicError as exc:  # it costs the episode that asked
                    answer.set_exception(exc)
            case messages.Play(number):
                task = asyncio.ensure_future(self._play(message))
                self._episodes[number] = task
                task.add_done_callback(lambda _: self._episodes.pop(number))
            case messages.Cancel(number):
                if (stopped := self._episodes.get(number)) is not None:
                    stopped.cancel()
            case messages.Runner(number, description):
                try:
                    self._runners[number] = made(description, partial(RemoteClient, self))
                except Exception as exc:  # what is not to be imported here, for one
                    self._runners[number] = ConfigError(
                        f"what episodes are played with cannot be made there: {error_text(exc)}"
                    )

    async def _play(self, play: messages.Play) -> None:
        doing = "it cannot be read there"
        try:
            episode = self._planned(play.episode)
            try:
                rollouts = await self._runner(play.runner).run(episode, play.max_steps)
            except Exception as exc:  # of configuration: nothing else comes out of a runner
                self._channel.put(messages.Played(play.number, error=sent_error(exc)))
                return
            doing = "what it recorded cannot be sent"
            lines = [rollout_line(rollout) for rollout in rollouts] if play.encode else []
            sent = [pack_exactly(rollout) for rollout in rollouts]
            self._channel.put(messages.Played(play.number, sent, lines))
        except SerializationError as exc:
            self._channel.put(messages.Played(play.number, lost=f"{doing}: {words_of(exc)}"))

    def _runner(self, number: int) -> EpisodeRunner:
        runner = self._runners[number]
        if isinstance(runner, ConfigError):
            raise runner
        if runner.specs > _KEPT_SPECS:
            self._runners[number] = runner = runner.afresh()
        return runner

    def _planned(self, data: bytes) -> PlannedEpisode:
        """The episode, with the same specs as others that are alike: what they name is kept."""
        planned = unpack(PlannedEpisode, data)
        request = planned.request
        env, protocol = self._alike(request.env), self._alike(request.protocol)
        inference = None if request.inference is None else self._alike(request.inference)
        own = changed(request, env=env, protocol=protocol, inference=inference)
        return changed(planned, request=own)

    def _alike(self, spec: T) -> T:
        if len(self._specs) > _KEPT_SPECS:
            self._specs.clear()
        same: T = self._specs.setdefault(pack(spec), spec)
        return same


def _imported(modules: Sequence[str]) -> str | None:
    """Imports what names stand for; returns what is wrong with it."""
    for module in modules:
        try:
            import_module(module)
        except Exception as exc:
            return f"{module!r} cannot be imported: {error_text(exc)}"
    # An episode makes much garbage and no circles: what is here by now is here to stay.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    return None


def _end_with(parent: int) -> None:
    """Ends this process after the one that started it, even where an episode holds up the loop."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(2 * _CLEAN_UP_S)
    os._exit(1)


async def _main(modules: Sequence[str], number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the process that started this one
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    await Worker().work(socket.socket(fileno=number), modules)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:-1], int(sys.argv[-1])))
