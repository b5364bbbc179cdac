"""`python -m ludic.inference.vllm_server`: vLLM's own server, with the flags that training needs.

vLLM itself is not changed. The server gets its RL routes (development mode), token-in-token-out if
the version has it, processed log-probs, and Ludic's weight transfer through vLLM's plugin entry
point. Without `--key-file` the update routes are open, so it listens on loopback unless told
otherwise. vLLM may have its own environment: `--python`, or `LUDIC_VLLM_PYTHON`. `find_server`
finds a server that is already running.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields
from http.client import HTTPException
from pathlib import Path
from typing import Literal, Self

from ludic.errors import ConfigError, DeadlineError, InferenceError, LudicError, MissingExtraError
from ludic.inference.vllm.flags import ServerSettings as ServerSettings
from ludic.inference.vllm.flags import VLLMBuild as VLLMBuild
from ludic.inference.vllm.flags import command_line as command_line
from ludic.inference.vllm.flags import environment as environment
from ludic.workers.watched_process import free_port as free_port
from ludic.workers.watched_process import signal_group

_GRACE_S = 20
_LOOK_EVERY_S, _LOOKS = 5.0, 3
"""How often a server's health is looked at, and how many bad looks in a row end it."""
# The server, and beside it in its group a watcher, which waits on a pipe that this process holds:
# a line says that the server was ended; without one this process is gone, however it went. Then
# it ends the group ($$, kindly first) and removes the folder ($0).
_WATCHED = f"""
exec 3<&0 </dev/null
(
    trap '' HUP INT TERM
    read -r line <&3 && exit
    kill -s TERM -- -$$
    waited=0
    while kill -s 0 $$ && [ $waited -lt {_GRACE_S} ]; do sleep 1; waited=$((waited + 1)); done
    rm -rf -- "$0"
    kill -s KILL -- -$$
) >/dev/null 2>&1 &
exec "$@" 3<&-
"""
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""These servers are on this machine, or near: no proxy is asked for them."""


class VLLMServer:
    """A running vLLM server with its children: `with VLLMServer(settings) as server: …`.

    Entering waits until it is healthy and raises with its last words where it does not come up;
    leaving ends it and everything it started. It ends with this process too, even where that is
    killed. `folder` is for its temporary files, the log too unless `log` says where, and is
    removed with it; by default it is a new one.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        python: str | None = None,
        log: str | Path | None = None,
        start_timeout_s: float = 600.0,
        folder: str | Path | None = None,
    ) -> None:
        self.settings, self.build = settings, VLLMBuild.of(python)
        self.start_timeout_s = start_timeout_s
        self._folder = Path(folder or tempfile.mkdtemp(prefix="ludic-vllm-"))
        self.log = Path(log) if log is not None else self._folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.settings.url

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the process; `wait_until_healthy` says when it serves."""
        if _port_is_taken(self.settings.host, self.settings.port):
            raise ConfigError(
                f"port {self.settings.port} of {self.settings.host} is in use: choose another, "
                "or stop the server that uses it"
            )
        if self.process is not None:  # one that died by itself, and its watcher
            self.kill()
        command = ["sh", "-c", _WATCHED, str(self._folder.absolute())]
        command += command_line(self.settings, self.build)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE,  # the watcher's; the server itself gets none
                env=environment(self.settings, self.build, self._folder / "plugin"),
                start_new_session=True,  # one group, so that its workers can be ended with it
            )

    def wait_until_healthy(self) -> None:
        """Returns when the server answers; raises with the reason when it ended or is too late."""
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            process = self.process  # `stop` may be called meanwhile, from another thread
            if process is None:
                raise InferenceError(f"vLLM {self.build.version} was stopped before it was healthy")
            if process.poll() is not None:
                raise InferenceError(
                    f"vLLM {self.build.version} ended with status {process.returncode} before it "
                    f"was healthy. Its last words:\n{self.last_words()}"
                )
            if self._health() == "good":
                if self.build.cpu:
                    _give_way(process.pid)
                return
            time.sleep(0.25)
        whom = f"{self.url}; its last words:\n{self.last_words()}"
        raise DeadlineError("a healthy vLLM server", whom, self.start_timeout_s)

    def wait(self) -> int:
        """Waits until the server has ended, and returns its exit status. One whose engine has died
        is ended: vLLM's own process may outlive it by minutes, and answers nobody."""
        process, looks = self.process, 0
        assert process is not None
        while looks < _LOOKS:
            try:
                return process.wait(timeout=_LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                looks = looks + 1 if self._health() == "dead" else 0
        self.kill()
        return process.returncode

    def _health(self) -> Literal["good", "dead", "unknown"]:
        try:
            with _direct.open(f"{self.url}/health", timeout=5) as answer:
                return "good" if answer.status == 200 else "unknown"
        except urllib.error.HTTPError as exc:  # 503: the engine is gone
            return "dead" if exc.code >= 500 else "unknown"
        except urllib.error.URLError as exc:
            return "dead" if isinstance(exc.reason, ConnectionRefusedError) else "unknown"
        except OSError:
            return "unknown"

    def last_words(self, lines: int = 25) -> str:
        """The end of the log, errors first where there are any."""
        if not self.log.is_file():
            return "(no output)"
        with open(self.log, encoding="utf-8", errors="replace") as log:
            every = deque(log, maxlen=400)
        errors = [line for line in every if "Error" in line or "error:" in line]
        return "".join([*errors[-5:], *list(every)[-lines:]]).strip() or "(no output)"

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Ends the server and its children, kindly first, and with them any wait for its health."""
        process, self.process = self.process, None
        if process is not None:
            for sign, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
                signal_group(process.pid, sign)
                try:
                    process.wait(timeout=wait_s)
                except subprocess.TimeoutExpired:
                    continue
                _dismiss_watcher(process)
                if _group_ended(process.pid, 5.0):
                    break
            _dismiss_watcher(process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Ends everything at once, as a crash would."""
        if self.process is not None:
            signal_group(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30)
            _dismiss_watcher(self.process)


def _port_is_taken(host: str, port: int) -> bool:
    target = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((target, port)) == 0


def _give_way(leader: int) -> None:
    """vLLM's processes wait for each other by spinning. On a few cores they would keep the trainer
    from running, for seconds at a time: so once it serves, its group and session get a smaller
    share than others. Until then it has work to do, and a deadline."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PGRP, leader, 10)
    with suppress(OSError):  # Linux shares among sessions first, and among their processes then
        Path(f"/proc/{leader}/autogroup").write_text("10")


def _dismiss_watcher(process: subprocess.Popen[bytes]) -> None:
    """Says that the server was ended. A watcher that was killed with it does not hear it."""
    if process.stdin is not None and not process.stdin.closed:
        with suppress(BrokenPipeError):
            process.stdin.write(b"\n")
        with suppress(BrokenPipeError):
            process.stdin.close()


def _group_ended(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not _group_lives(group):
            return True
        time.sleep(0.1)
    return False


def _group_lives(group: int) -> bool:
    """Whether a process of the group runs. In a container nobody may collect those that ended,
    so that the system still lists them: they do not count."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    if not Path("/proc/self/stat").exists():
        return True
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                return True
    return False


def parse(arguments: Sequence[str] | None = None) -> tuple[ServerSettings, argparse.Namespace]:
    """The command line; what it does not know is handed to vLLM as it stands."""
    parser = argparse.ArgumentParser(
        prog="python -m ludic.inference.vllm_server",
        usage="%(prog)s MODEL [flags], or --model MODEL [flags]",
        description="Start vLLM's own server for training. Further flags go to vLLM.",
    )
    parser.add_argument("--model", required=True, help="a folder or a name on the hub")
    parser.add_argument("--served-model-name", dest="served_name", help="the name that clients use")
    parser.add_argument("--host", default="127.0.0.1", help="if not loopback, also set --key-file")
    parser.add_argument("--key-file", help="a file with the key that every request must send")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--pass-on",
        metavar="ADDRESS",
        help="relay weights to other machines from this address, with or without a port; auto: "
        "the address that reaches the trainer",
    )
    parser.add_argument("--dtype", help="default: float32 on the CPU build, else the model's")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--kv-cache-gib", type=int, default=1, help="CPU build only")
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--enforce-eager", dest="eager", action="store_true", default=None)
    parser.add_argument(
        "--no-live-updates", dest="live_updates", action="store_false", help="take no new weights"
    )
    parser.add_argument("--max-lora-rank", type=int, help="take LoRA adapters up to this rank")
    parser.add_argument("--max-loras", type=int, default=4, help="most adapters at once")
    parser.add_argument("--python", help="the Python with vLLM; default: LUDIC_VLLM_PYTHON")
    parser.add_argument("--log", help="where the server's output goes")
    parser.add_argument("--start-timeout-s", type=float, default=600.0)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and not words[0].startswith("-"):  # only the first: any other may be a flag's value
        words.insert(0, "--model")
    args, rest = parser.parse_known_args(words)
    stated = {f.name: getattr(args, f.name) for f in fields(ServerSettings) if f.name in args}
    settings = ServerSettings(**stated, extra=tuple(rest))
    return settings, args


def main(
    arguments: Sequence[str] | None = None,
    while_healthy: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> int:
    """The command: starts the server, says when it is healthy, and stays until it ends or is told
    to stop. `while_healthy` is given the address, and entered for as long as the server serves."""
    settings, args = parse(arguments)
    limit = args.start_timeout_s
    try:
        server = VLLMServer(settings, python=args.python, log=args.log, start_timeout_s=limit)
    except (ConfigError, MissingExtraError) as exc:
        print(exc, file=sys.stderr)
        return 2
    if args.log is None:  # a user reads it when the server has ended: not in its temporary files
        server.log = Path(tempfile.mkdtemp(prefix="ludic-vllm-log-"), "server.log")
    # A plain SIGTERM would leave the children behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    print(f"starting vLLM {server.build.version}; its output is in {server.log}", flush=True)
    try:
        with server, while_healthy(server.url):
            print(f"{server.url} is healthy after {time.monotonic() - began:.0f} s", flush=True)
            code = server.wait()
            print(f"the server ended with status {code}:\n{server.last_words()}", file=sys.stderr)
            return code or 1
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 0
    except LudicError as exc:
        print(exc, file=sys.stderr)
        return 1


DEFAULT_PORT = 8000
"""Where vLLM listens unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server, the name under which it serves its model, and where it has the model from."""

    url: str
    name: str
    model: str


def find_server(
    model: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    timeout_s: float = 5.0,
) -> FoundServer | None:
    """The server at `port`, which must then be there and serve `model`. Without a port, the one at
    vLLM's own, if there is one that serves `model`. Without a model, any will do."""
    url = f"http://{host}:{port or DEFAULT_PORT}"
    try:
        with _direct.open(f"{url}/v1/models", timeout=timeout_s) as answer:
            served = [
                FoundServer(url, str(row["id"]), str(row.get("root") or row["id"]))
                for row in json.load(answer)["data"]
            ]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as exc:
        if port is None:
            return None
        raise InferenceError(
            f"no vLLM server answers at {url} ({exc}): start one with `ludic serve MODEL --port "
            f"{port}`, or name another port"
        ) from exc
    fitting = (server for server in served if model in (None, server.name, server.model))
    if (server := next(fitting, None)) is not None or port is None:
        return server
    raise InferenceError(
        f"the server at {url} serves {[server.name for server in served]}, not {model!r}: name its "
        "model, or another port"
    )
