"""Hosts that are none: network namespaces of this machine, joined by links of a stated speed.

It takes Linux, `ip`, `tc` and root. Everything stays on this machine, and goes when it is left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Self


class NoNamespacesError(RuntimeError):
    """This machine cannot make them; says why."""


class Hosts:
    """So many namespaces on one bridge, on which this process is, too: at `address`. Each sends and
    receives at most `mbit` megabits a second; None: as fast as the machine does."""

    def __init__(self, count: int, mbit: float | None = None) -> None:
        self.mbit = mbit
        tag = f"{os.getpid() % 100_000:x}"
        net = f"198.18.{os.getpid() % 250}"  # a range that is set apart for benchmarks
        self._bridge = f"ldb{tag}"
        self.names = [f"ludic-{tag}-{number}" for number in range(count)]
        self._ends = [f"ld{tag}.{number}" for number in range(count)]
        self.address = f"{net}.1"
        self.addresses = [f"{net}.{number + 2}" for number in range(count)]

    def __enter__(self) -> Self:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise NoNamespacesError(f"there is no `{tool}` here (Debian: iproute2)")
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        bridge = self._bridge
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.address}/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for name, end, address in zip(self.names, self._ends, self.addresses, strict=True):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", end, "master", bridge, "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            if self.mbit is not None:
                for where in (("tc",), ("tc", "-n", name)):
                    device = end if where == ("tc",) else "eth0"
                    limit = ("rate", f"{self.mbit}mbit", "burst", "256kb", "latency", "50ms")
                    run(*where, "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def __exit__(self, *exc: object) -> None:
        for device in (*self._ends, self._bridge):
            with suppress(NoNamespacesError):
                run("ip", "link", "delete", device)
        for name in self.names:
            with suppress(NoNamespacesError):
                run("ip", "netns", "delete", name)

    def command(self, host: int, command: Sequence[str], hidden: Sequence[str] = ()) -> list[str]:
        """The command as it runs on a host, with folders of its own in the place of those `hidden`:
        apart from these, the hosts have the same files."""
        inside = ["ip", "netns", "exec", self.names[host]]
        for folder in hidden:  # `ip netns exec` gives each command its own mounts
            inside += ["sh", "-c", f'mount -t tmpfs none "{folder}" && exec "$@"', "sh"]
        return [*inside, *command]

    def cut(self, host: int) -> None:
        """Takes a host's link away."""
        run("ip", "link", "set", self._ends[host], "down")

    def mend(self, host: int) -> None:
        """Gives it back."""
        run("ip", "link", "set", self._ends[host], "up")

    def received(self, host: int) -> int:
        """The bytes that have come to a host."""
        return int(run(*self.command(host, ["cat", "/sys/class/net/eth0/statistics/rx_bytes"])))


def run(*command: str) -> str:
    """What a command prints. Raises `NoNamespacesError` with its complaint."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise NoNamespacesError(f"`{' '.join(command)}`: {done.stderr.strip()}")
    return done.stdout
