"""Which user a program runs as, and which Python it gets."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

_OWN_RANGE, _PER_PROCESS = 1_800_000_000, 64
_NOBODY = 65534

_counter = count()


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python that programs run with: where it is, and what must be readable for it."""

    executable: str
    prefix: str


def spare_user() -> int | None:
    """A user id that owns nothing, one per worker. None where this process is not root, or only
    in a user namespace without other users: it is then an ordinary user outside."""
    if os.geteuid() != 0:
        return None
    wanted = _OWN_RANGE + os.getpid() % 4_194_304 * _PER_PROCESS + next(_counter) % _PER_PROCESS
    ranges = [
        tuple(map(int, line.split()))
        for line in Path("/proc/self/uid_map").read_text().splitlines()
    ]
    for uid in (wanted, _NOBODY):
        if any(first <= uid < first + length for first, _, length in ranges):
            return uid
    return None


def interpreter() -> Interpreter:
    """The Python that this one's virtual environment was made from: without its packages."""
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return Interpreter(executable, os.path.realpath(sys.base_prefix))


def readable_by_all(path: str) -> bool:
    """Whether any user can get to `path`: every folder above it can be passed."""
    place = Path(path)
    try:
        return all(folder.stat().st_mode & 0o001 for folder in (place, *place.parents))
    except OSError:
        return False
