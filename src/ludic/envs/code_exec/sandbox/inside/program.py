"""From a fork of the template to a running program: its files, limits and first instruction."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from ludic.envs.code_exec.sandbox.inside import confine

# A program may replace what `os` has, and must not change how its own end is told.
_exit, _write_to = os._exit, os.write


def become_init(
    request: Mapping[str, Any], files: Mapping[str, bytes], fds: Sequence[int], status_fd: int
) -> NoReturn:
    """The program's parent: prepares its folder, starts it, waits for it, and says how it ended.

    In a PID namespace this is the first process: nothing in it can end this one, and all else
    there ends with it. Writes "B" before it starts the program, then "S" and the wait status; or
    "E" and what went wrong.
    """
    try:
        confine.prctl(confine.PR_SET_DUMPABLE, 0)  # its memory and descriptors are not for others
        os.umask(0o077)
        folder = request["folder"]
        limits = request["limits"]
        if request["mode"] == "bubblewrap":
            confine.private_folders(folder, int(limits["disk_bytes"]), int(limits["files"]))
            confine.drop_capabilities()
        else:
            confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
            confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(folder)
        for name, content in files.items():
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "xb") as file:
                file.write(content)
        os.write(status_fd, b"B")
        program = os.fork()
        if program == 0:
            _become_program(request, fds)
        os.closerange(0, status_fd)  # what it holds open has no end for the program
        os.closerange(status_fd + 1, 1 << 20)
        while True:
            pid, status = os.wait()
            if pid == program:
                break
        os.write(status_fd, b"S" + status.to_bytes(4, "big"))
    except BaseException as error:
        os.write(status_fd, b"E" + f"{type(error).__name__}: {error}".encode())
    os._exit(0)


def _become_program(request: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(3, 1 << 20)
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["environment"])
        confine.set_limits(request["limits"], request["others"])
        confine.prctl(confine.PR_SET_NO_NEW_PRIVS, 1)
        confine.prctl(confine.PR_SET_DUMPABLE, 1)
        own = os.getpid().to_bytes(4, sys.byteorder)
        placeholder = request["own_pid"].to_bytes(4, sys.byteorder)
        confine.install_filter(bytes.fromhex(request["filter"]).replace(placeholder, own))
        command = list(request["command"])
        if command[0] == "python" and len(command) > 1 and not command[1].startswith("-"):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            _run_here(command[1:])
        if command[0] == "python":
            command[0] = sys.executable
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{error.filename or request['command'][0]}: {error.strerror}\n".encode())
    os._exit(127)


def _run_here(argv: list[str]) -> NoReturn:
    """Runs a Python file in this process as `python file` would: this interpreter is a fork of
    one that has run nothing yet, which saves its start."""
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    main = ModuleType("__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ludic"]:
        del sys.modules[name]
    sys.modules["__main__"] = main
    main.__dict__.update(__file__=argv[0], __builtins__=__builtins__)
    code = 1
    try:
        with open(argv[0], "rb") as file:
            source = file.read()
        exec(compile(source, argv[0], "exec", dont_inherit=True), main.__dict__)
        code = 0
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            code = (stop.code or 0) & 0xFF
        else:
            _say(f"{stop.code}\n")
    except BaseException as error:
        _show(error)
    finally:
        _finish(code)


def _finish(code: int) -> NoReturn:
    """What the interpreter does at its end, in its order."""
    try:
        import threading

        threading._shutdown()  # type: ignore[attr-defined]
        import atexit

        atexit._run_exitfuncs()
    except BaseException as error:
        _show(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            code = code or 120
    _exit(code)


def _show(error: BaseException) -> None:
    """The traceback, from the program's first frame on."""
    try:
        import traceback

        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith("<ludic"):
            frames = frames.tb_next
        _say("".join(traceback.format_exception(type(error), error, frames)))
    except BaseException:  # the program has broken what is needed for it
        _write_to(2, f"{type(error).__name__}\n".encode())


def _say(text: str) -> None:
    try:
        sys.stdout.flush()
    finally:
        _write_to(2, text.encode("utf-8", "backslashreplace"))
