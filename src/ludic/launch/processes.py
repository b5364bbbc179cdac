"""One node's share of a role: its processes, each with its log. Used by every engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from ludic.errors import LaunchError
from ludic.launch.roles import Role
from ludic.sharding.ranks import environment_alone
from ludic.workers.watched_process import WatchedProcess, last_words
from ludic.workers.watched_process import free_port as free_port

_LINES = 3


class Processes:
    """Starts the processes of node number `node`; they end with this one. `master` is where the
    ranks of a gang meet."""

    def __init__(
        self,
        role: Role,
        node: int = 0,
        *,
        address: str = "127.0.0.1",
        master: tuple[str, int] | None = None,
    ) -> None:
        self._processes: list[WatchedProcess] = []
        self._logs: list[Path] = []
        listens = any("{port}" in word for word in role.command)
        port = str(free_port(address)) if listens else ""
        command = [w.replace("{address}", address).replace("{port}", port) for w in role.command]
        environment = {**environment_alone(), **role.variables}
        if role.secrets is not None:
            try:
                environment |= json.loads(role.secrets.read_text(encoding="utf-8"))
            except (OSError, ValueError) as exc:
                raise LaunchError(f"{role.name}: cannot read {role.secrets}: {exc}") from exc
        try:
            for local in range(role.processes):
                self._begin(role, command, environment | _rank_of(role, node, local, master))
        except OSError as exc:
            self.end(0.0)
            raise LaunchError(f"{role.name} cannot be started: {exc}") from exc

    def _begin(self, role: Role, command: list[str], environment: dict[str, str]) -> None:
        log = role.log
        if role.world > 1:
            log = log.with_name(f"{log.stem}-rank{environment['RANK']}{log.suffix}")
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            process = WatchedProcess(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=role.folder,
            )
        self._processes.append(process)
        self._logs.append(log)

    def poll(self) -> tuple[int, str] | None:
        """Returns None while all is well. Otherwise the first status that is not 0, with what that
        process said last; or 0 once every process has ended with it."""
        statuses = [process.poll() for process in self._processes]
        for status, log in zip(statuses, self._logs, strict=True):
            if status:
                return status, last_words(log, _LINES)
        if all(status == 0 for status in statuses):
            return 0, last_words(self._logs[0], _LINES)
        return None

    def send(self, sign: signal.Signals) -> None:
        """Sends a signal to the first process."""
        self._processes[0].send_signal(sign)

    def end(self, grace_s: float) -> None:
        """Ends all of them; together they have `grace_s`."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.end(grace_s=max(deadline - time.monotonic(), 0.0))


def _rank_of(role: Role, node: int, local: int, master: tuple[str, int] | None) -> dict[str, str]:
    """Which rank of its gang a process is, as torch reads it; nothing for one that is alone."""
    if role.world == 1:
        return {}
    assert master is not None
    ranks = {"RANK": node * role.processes + local, "LOCAL_RANK": local}
    ranks |= {"WORLD_SIZE": role.world, "LOCAL_WORLD_SIZE": role.processes}
    variables = {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return variables | {name: str(value) for name, value in ranks.items()}


def private_file(path: Path, text: str) -> None:
    """Writes a file that only this user can read."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
