"""The template: the process that every program is a fork of, and that has never seen a request.

Over its control socket come its settings, once, and then one byte per program with a descriptor:
the socket over which the host sends that program to a fork of this process. So no content of
anybody's is ever in its memory, its frames or its descriptors. It ends when its host does.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from ludic.envs.code_exec.sandbox.inside import confine, supervisor, tree


def main(settings: Mapping[str, Any]) -> NoReturn:
    """Forks until nobody asks any more."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    confine.prctl(confine.PR_SET_DUMPABLE, 0)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # else the collector of every fork copies all of its pages
    control.sendall(b"H")
    try:
        while True:
            asked, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not asked:
                break
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                control.close()
                supervisor.supervise(settings, descriptors[0])
            os.close(descriptors[0])
    except BaseException as error:  # the host reads it, and counts the worker as broken
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        if settings["mode"] == "plain":
            with suppress(Exception):
                tree.kill()
                supervisor.empty(settings["folder"])
                os.rmdir(settings["folder"])
        os._exit(0)
