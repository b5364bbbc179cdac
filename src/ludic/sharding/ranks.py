"""The ranks that `torchrun` starts: which one this process is, and which reports a failure.

Asking who this is takes no torch.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

FAILURES = "ludic/failures"
PATIENCE_S = 30.0
"""How long a rank that was told of another's failure gives that one to report it."""


@dataclass(frozen=True, slots=True)
class Launched:
    """This process among those that were started together; alone unless `torchrun` says so."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        return self.rank == 0


def launched() -> Launched:
    """Returns which of the ranks this process is, by the environment that `torchrun` gives it."""
    names = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    return Launched(*(int(os.environ.get(name, default)) for name, default in names))


def environment_alone() -> dict[str, str]:
    """This process's environment for one that it starts and that is none of the ranks."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
    return {name: value for name, value in os.environ.items() if name not in ours}


def tells_of_failure(*, told_of_it: bool = False) -> bool:
    """Whether this rank is to report that the run failed: the first one that asks.

    One that was only told of another's failure lets that one go first, and stays until it has: when
    a rank ends, `torchrun` ends the others. The ranks agree over the store that they met at.
    """
    if launched().size == 1:
        return True
    import torch.distributed as dist

    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection((host, port), timeout=5).close()  # torch would say much of it
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False
        )
        deadline = time.monotonic() + (PATIENCE_S if told_of_it else 0.0)
        while time.monotonic() < deadline and not store.add(FAILURES, 0):
            time.sleep(0.05)
        first = bool(store.add(FAILURES, 1) == 1)
    except (KeyError, ValueError, OSError, RuntimeError):  # nobody is left to agree with
        return True
    if not first:
        time.sleep(0.5)  # the report is being written
    return first
