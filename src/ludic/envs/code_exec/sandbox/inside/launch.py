"""Started by root: gives up root, for good, and then becomes the sandbox.

Root is exempt from the limit on processes, and its files are open to it. So a user that owns
nothing takes its place before the sandbox starts. What that user could not reach (an interpreter
below /root) is bound to where it can, in a mount namespace that ends with this process. With a
cgroup, this process stays outside of it, waits for the end, and removes it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from ludic.envs.code_exec.sandbox.inside import confine


def main() -> NoReturn:
    """Takes its settings as JSON from the last argument."""
    settings = json.loads(sys.argv[-1])
    group = settings.get("cgroup")
    if group is None:
        _become(settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    child = os.fork()
    if child == 0:
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        _become(settings)
    for fd in (0, 1):  # the sandbox's alone: it must see their end
        os.close(fd)
    ended = select.poll()
    ended.register(os.pidfd_open(child), select.POLLIN)
    while not ended.poll(500):
        if os.getppid() != parent:
            _kill(group)
    _kill(group)
    _, status = os.waitpid(child, 0)
    deadline = time.monotonic() + 10
    while os.path.exists(group) and time.monotonic() < deadline:
        try:
            os.rmdir(group)
        except OSError:
            time.sleep(0.02)
    os._exit(0 if status == 0 else 1)


def _kill(group: str) -> None:
    with suppress(OSError), open(f"{group}/cgroup.kill", "w") as file:
        file.write("1")


def _become(settings: dict[str, Any]) -> NoReturn:
    if settings["binds"]:
        confine.unshare(confine.CLONE_NEWNS)
        confine.mount("none", "/", "", confine.MS_REC | confine.MS_PRIVATE)
        confine.mount("tmpfs", "/mnt", "tmpfs", confine.MS_NOSUID | confine.MS_NODEV, "mode=0755")
        for source, target in settings["binds"]:
            os.mkdir(target)
            confine.mount(source, target, "", confine.MS_BIND | confine.MS_REC)
    if settings["uid"] is not None:
        os.setgroups([])
        os.setresgid(settings["uid"], settings["uid"], settings["uid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    os.chdir("/")
    os.execv(settings["command"][0], settings["command"])
