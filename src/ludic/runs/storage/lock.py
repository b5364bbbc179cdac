"""One process per run folder."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from ludic.errors import ConfigError

FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder, or raises a `ConfigError` that names the process that has it locked.

    The kernel releases the lock of a process that ended, however it ended. A holder on another
    host may be out of the kernel's sight, so there the file's content counts, unless it was
    written before a reboot of this host.
    """
    path = folder / FILE
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{_who(folder, _read(file))}: wait until it ends") from None
        holder, me = _read(file), _me()
        if holder and holder.get("boot") != me["boot"] and holder.get("host") != me["host"]:
            raise ConfigError(
                f"{_who(folder, holder)}, where it cannot be seen from here: if it has ended, "
                f"remove {path}"
            )
        _write(file, json.dumps(me))
        try:
            yield
        finally:
            _write(file, "")


def _me() -> dict[str, Any]:
    boot = ""
    with suppress(OSError):  # not on every system
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": os.getpid(), "host": platform.node(), "boot": boot, "since": since}


def _who(folder: Path, holder: dict[str, Any]) -> str:
    found = "process {pid} on host {host} since {since}"
    who = found.format_map(holder) if holder else "another process"
    return f"{folder} is being trained by {who}"


def _read(file: TextIO) -> dict[str, Any]:
    """Returns what the holder wrote: nothing if it released the lock, or is only taking it."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return holder if {"pid", "host", "since"} <= holder.keys() else {}
    except (ValueError, AttributeError):
        return {}


def _write(file: TextIO, text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()
