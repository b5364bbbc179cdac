"""The one file that talks to Redis.

Calls are plain functions that block; a coroutine runs them in a thread. A connection that breaks,
a server that is loading, paused or full is asked again until `patience_s` is over; then the error
says what was waited for, and on whom. Every script may be repeated: the second time it finds its
work done.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ludic.errors import ConfigError, MissingExtraError, PipelineError
from ludic.inference.addresses import without_user

try:
    import redis
    from redis import exceptions as errors
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ModuleNotFoundError as exc:  # one sentence that names the extra
    raise MissingExtraError("redis", "redis") from exc

_log = logging.getLogger("ludic.pipeline")
T = TypeVar("T")

_PASSING = (
    *(errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError),
    *(errors.OutOfMemoryError, errors.ReadOnlyError),
)
_PASSING_CODES = ("OOM", "LOADING", "MISCONF", "BUSY", "READONLY", "MASTERDOWN")
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
_ALWAYS_TAKEN = 1_000_000  # no server can be told to take less than 1 MiB
_LEAST_BREAKS, _BREAKING_S = 4, 10.0  # a line that flaps has had its time by then
MAX_NAME = 200
_LUA = Path(__file__).with_name("scripts.lua")
_KEYS = ("requests", "groups", "units", "meta", "actors", "trainer", "servers", "roles")
_HASHES = ("meta", "actors", "units", "servers", "roles")


@cache
def read_scripts() -> dict[str, str]:
    """Returns the scripts of `scripts.lua` by name, each after the pieces that it names."""
    keys = "\n".join(f"local {name} = KEYS[{i}]" for i, name in enumerate(_KEYS, start=1))
    pieces: dict[str, str] = {}
    scripts: dict[str, str] = {}
    for part in _LUA.read_text(encoding="utf-8").split("\n--- ")[1:]:
        heading, _, code = part.partition("\n")
        kind, name, *needed = heading.split()
        if kind == "piece":
            pieces[name] = code
        else:
            scripts[name] = "\n".join([keys, *(pieces[piece] for piece in needed), code])
    return scripts


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Where a run's streams are. `url` is a Redis URL: `redis://`, `rediss://` (TLS) or `unix://`,
    with user and password where the server wants them. `run` is the name under which its keys are
    kept. `patience_s` bounds every wait for a server that does not answer; `call_s` one call."""

    url: str = "redis://127.0.0.1:6379/0"
    run: str = "run"
    patience_s: float = 300.0
    call_s: float = 10.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._+-]+", self.run) or len(self.run) > MAX_NAME:
            raise ConfigError(
                f"a pipeline's run={self.run!r}: use up to {MAX_NAME} letters, digits and . _ + -"
            )
        if not (self.patience_s > 0 and self.call_s > 0):
            raise ConfigError("patience_s and call_s of a pipeline must be > 0")

    @property
    def shown(self) -> str:
        """The address without user and password."""
        return without_user(self.url)


class LostRunError(PipelineError):
    """Another trainer holds the run by now."""


class NoAnswerError(PipelineError):
    """The server did not answer for as long as was waited for it."""


class RefusedError(PipelineError):
    """The server does not take a request, and would not take it later: it is too large."""


class EmptiedError(PipelineError):
    """The server has forgotten the trainer that asks, and nobody else holds the run."""


class Store:
    """The streams of one run. Any thread may call it."""

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        self._closed = threading.Event()
        self._until = math.inf
        prefix = f"ludic:{{{config.run}}}:"
        self.keys = {name: prefix + name for name in _KEYS}
        over_tcp = {"socket_connect_timeout": config.call_s, "socket_keepalive": True}
        try:
            self._redis: Any = redis.Redis.from_url(
                config.url,
                **({} if config.url.startswith("unix:") else over_tcp),
                socket_timeout=config.call_s,
                retry=Retry(NoBackoff(), 0),
                decode_responses=False,
            )
        except (ValueError, TypeError) as exc:
            raise ConfigError(
                f"{config.shown!r} is not the URL of a Redis: it begins with redis://, rediss:// "
                f"or unix:// ({exc})"
            ) from exc
        self._scripts = {
            name: self._redis.register_script(script) for name, script in read_scripts().items()
        }

    def close(self) -> None:
        """Ends the connections, and every wait."""
        self._closed.set()
        self._redis.close()

    def hurry(self, seconds: float) -> None:
        """From now on, every wait for a server that does not answer ends within this time."""
        self._until = min(self._until, time.monotonic() + seconds)

    def run(self, script: str, *args: Any, patience_s: float | None = None) -> Any:
        """What a script returns. Raises `LostRunError` where it needs the run and another trainer
        holds it, and `EmptiedError` where the server has lost its data."""
        keys = list(self.keys.values())
        call = self._scripts[script]
        size = sum(len(arg) for arg in args if isinstance(arg, bytes))
        answer = self.patiently(lambda: call(keys=keys, args=args), script, patience_s, size)
        if isinstance(answer, list) and answer and answer[0] == b"lost":
            raise LostRunError(
                f"another trainer holds the run {self.config.run!r} on {self.config.shown}: this "
                "one was away for longer than its lease, and must not continue"
            )
        if isinstance(answer, list) and answer and answer[0] == b"emptied":
            raise EmptiedError(
                f"Redis at {self.config.shown} has lost what it held of the run {self.config.run!r}"
            )
        return answer

    async def run_async(self, script: str, *args: Any, patience_s: float | None = None) -> Any:
        """`run` for coroutines."""
        return await asyncio.to_thread(self.run, script, *args, patience_s=patience_s)

    def patiently(
        self, call: Callable[[], T], what: str, patience_s: float | None = None, size: int = 0
    ) -> T:
        """What `call` returns, asked again while the server cannot answer. Where for a while it
        breaks off nothing but a request of this `size`, the request is too large for it."""
        patience = self.config.patience_s if patience_s is None else patience_s
        began = time.monotonic()
        wait, warned, breaks = _FIRST_WAIT_S, False, list[float]()
        while True:
            try:
                return call()
            except (errors.AuthenticationError, errors.NoPermissionError) as exc:
                raise PipelineError(
                    f"Redis at {self.config.shown} refuses this user: {exc}. Check the user and "
                    "password in the URL, and the user's ACL (keys ludic:*, scripts and streams)"
                ) from None
            except _PASSING as exc:
                problem: errors.RedisError = exc
                broken = size > _ALWAYS_TAKEN and isinstance(exc, errors.ConnectionError)
                breaks = [*breaks, time.monotonic()] if broken and self._answers() else []
                if len(breaks) >= _LEAST_BREAKS and breaks[-1] - breaks[0] >= _BREAKING_S:
                    raise RefusedError(
                        f"Redis at {self.config.shown} breaks off a request of {size:,} bytes "
                        f"({what}): raise its client-query-buffer-limit and proto-max-bulk-len"
                    ) from exc
            except errors.ResponseError as exc:
                if _code(exc) not in _PASSING_CODES:
                    kind = RefusedError if _code(exc) == "Protocol" else PipelineError
                    raise kind(f"Redis at {self.config.shown} cannot do {what!r}: {exc}") from exc
                problem, breaks = exc, []
            waited = time.monotonic() - began
            hurried = time.monotonic() >= self._until
            if waited >= patience or hurried or self._closed.is_set():
                raise NoAnswerError(
                    f"waited {waited:.3g} s for Redis at {self.config.shown} ({what}): "
                    f"{_in_words(problem)}"
                ) from problem
            if not warned and waited > 2.0:
                _log.warning(
                    "waiting for Redis at %s (%s): %s; gives up after %.3g s",
                    *(self.config.shown, what, _in_words(problem), patience),
                )
                warned = True
            self._closed.wait(min(wait, max(patience - waited, 0.01)))
            wait = min(wait * 2, _LONGEST_WAIT_S)

    def _answers(self) -> bool:
        """Whether the server answers a small request at this moment."""
        with suppress(errors.RedisError):
            return bool(self._redis.ping())
        return False

    def durability(self) -> str:
        """What a crash of the server can cost, as it is set up: "always" (nothing that it has
        confirmed), "everysec" (about a second), "no" (more), "off" (everything since its last
        snapshot), or "unknown" where it does not say."""
        plain = self._settings("append*")
        if plain.get("appendonly") != "yes":
            return "off" if "appendonly" in plain else "unknown"
        return plain.get("appendfsync", "unknown")

    def eviction(self) -> str | None:
        """How the server makes room in a full memory, if any key may have to go; else None."""
        plain = self._settings("maxmemory*")
        policy = plain.get("maxmemory-policy", "")
        bounded = plain.get("maxmemory", "0") != "0"
        return policy if bounded and policy.startswith("allkeys") else None

    def _settings(self, pattern: str) -> dict[str, str]:
        """The server's settings of such names; none where it does not tell them."""
        try:
            settings = self.patiently(lambda: self._redis.config_get(pattern), "its settings")
        except PipelineError:
            return {}
        return {_text(name): _text(value) for name, value in settings.items()}

    def facts(self) -> dict[str, Any]:
        """Everything that `ludic pipeline status` shows. No transaction: a full server would refuse
        one."""

        def ask() -> list[Any]:
            pipe = self._redis.pipeline(transaction=False)
            pipe.time()
            pipe.pttl(self.keys["trainer"])
            pipe.xlen(self.keys["requests"])
            pipe.xlen(self.keys["groups"])
            for name in _HASHES:
                pipe.hgetall(self.keys[name])
            answer: list[Any] = pipe.execute()
            return answer

        now, lease, queued, groups, *hashes = self.patiently(ask, "the run's state")
        held = {
            name: {_text(k): _text(v) for k, v in texts.items()}
            for name, texts in zip(_HASHES, hashes, strict=True)
        }
        pending = 0
        if queued:
            summary = self.patiently(
                lambda: self._redis.xpending(self.keys["requests"], "actors"), "the leases"
            )
            pending = int(summary["pending"])
        return {
            "now_ms": now[0] * 1000 + now[1] // 1000,
            **held,
            "units": {int(number): note for number, note in held["units"].items()},
            "lease_ms": max(int(lease), 0),
            "requests": int(queued),
            "leased": pending,
            "groups": int(groups),
        }

    def notes(self, name: str, patience_s: float | None = None) -> dict[str, tuple[float, str]]:
        """What a hash of the run holds that the script `note` wrote: age in seconds, and text."""
        return {
            _text(key): (int(age) / 1000, _text(text))
            for key, age, text in self.run("notes", name, patience_s=patience_s)
        }

    def memory(self) -> int:
        """The bytes that the server uses, for everything it holds."""
        return int(self.patiently(lambda: self._redis.info("memory"), "memory")["used_memory"])

    def forget(self) -> None:
        """Deletes the run's keys, and no others."""
        self.patiently(lambda: self._redis.delete(*self.keys.values()), "deleting the run")


def _code(error: Exception) -> str:
    """The code that an error begins with. Redis before 7 wraps what a command in a script was
    refused for: "Error running script (call to f_…): @user_script:13: …: -OOM command …"."""
    text = str(error)
    if text.startswith("Error running script"):
        text = text.rpartition(": -")[2]
    return text.partition(" ")[0]


def _in_words(error: Exception) -> str:
    text = str(error)
    if isinstance(error, errors.OutOfMemoryError) or _code(error) == "OOM":
        return "its memory is full (maxmemory): raise it, or lower pipeline.max_bytes"
    if isinstance(error, errors.TimeoutError):
        return f"it does not answer ({text})"
    return text or type(error).__name__


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def entries(rows: Sequence[Any]) -> list[tuple[str, int, bytes]]:
    """Stream entries as scripts return them: entry id, unit number, message."""
    return [(_text(entry), int(number), message) for entry, number, message in rows]


def flat(pairs: Iterable[Sequence[Any]]) -> list[Any]:
    """The arguments of a script that takes several rows."""
    return [value for row in pairs for value in row]
