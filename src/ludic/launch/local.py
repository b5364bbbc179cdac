"""The engine of one host: every role is a process of this machine."""

from __future__ import annotations

import signal
import socket

from ludic.launch.processes import Processes, free_port
from ludic.launch.roles import Ended, Placement, Role, Running, Waiting


class LocalEngine:
    """Starts roles here. A gang's nodes are all this host."""

    gpus = 0.0  # each process takes what it finds

    def start(self, role: Role) -> Placement:
        return _Here(role)

    def shortage(self, roles: list[Role]) -> str | None:
        return None

    def close(self) -> None:
        pass


class _Here:
    def __init__(self, role: Role) -> None:
        master = ("127.0.0.1", free_port("127.0.0.1")) if role.world > 1 else None
        self._nodes: list[Processes] = []
        try:
            for node in range(role.nodes):
                self._nodes.append(Processes(role, node, master=master))
        except BaseException:
            self.end(0.0)
            raise

    def poll(self) -> Waiting | Running | Ended:
        running = Running((socket.gethostname(),))
        return together([node.poll() for node in self._nodes], running)

    def send(self, sign: signal.Signals) -> None:
        self._nodes[0].send(sign)

    def end(self, grace_s: float) -> None:
        for node in self._nodes:
            node.end(grace_s)


def together(nodes: list[tuple[int, str] | None], running: Running) -> Running | Ended:
    """How a role stands whose nodes stand like this: the first failure is everybody's."""
    ended = [node for node in nodes if node is not None]
    failed = [node for node in ended if node[0]]
    if failed or len(ended) == len(nodes):
        return Ended(*(failed or ended)[0])
    return running
