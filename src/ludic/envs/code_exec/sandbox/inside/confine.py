"""System calls that Python has no functions for: namespaces, mounts, capabilities, seccomp."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping, Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leaves the namespaces in `flags` for new ones."""
    _checked(_libc.unshare(flags), f"unshare(0x{flags:x})")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """The system call of that name."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None
    )
    _checked(result, f"mount {kind or source} on {target}")


def prctl(option: int, value: int) -> None:
    """The system call of that name, for options with one number."""
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl({option})")


def own_namespaces() -> None:
    """New user and IPC namespaces for this process, with its user and group under the numbers
    that they have outside, and a new PID namespace for its children."""
    uid, gid = os.getuid(), os.getgid()
    prctl(PR_SET_DUMPABLE, 1)  # else its uid_map belongs to root
    unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWIPC)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    prctl(PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """Gives up every capability, in all three sets."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    empty = (ctypes.c_uint32 * 6)()
    _checked(_libc.syscall(_CAPSET[os.uname().machine], header, empty), "capset")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_filter(program: bytes) -> None:
    """Puts a seccomp filter, given as its bytes, on this process and all that it starts."""
    filled = _Program(len(program) // 8, program)
    result = _libc.prctl(
        PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(filled), 0, 0
    )
    _checked(result, "prctl(PR_SET_SECCOMP)")


def private_folders(writable: str, disk_bytes: int, files: int) -> None:
    """For the first process of new user and PID namespaces: a mount namespace with an empty
    folder to write to that ends with it, and a /proc that shows only its processes."""
    unshare(CLONE_NEWNS)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    options = f"size={disk_bytes},nr_inodes={files},mode=0700"
    mount("tmpfs", writable, "tmpfs", MS_NOSUID | MS_NODEV, options)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if os.path.isdir("/dev/shm"):
        shared = f"{writable}/.shm"
        os.mkdir(shared, 0o700)
        mount(shared, "/dev/shm", "", MS_BIND)


def set_limits(limits: Mapping[str, float], others: int = 0) -> None:
    """Resource limits of this process and of each that it starts. The limit on processes is on
    all of the user's; `others` are those that were there before."""
    cpu = max(1, int(limits["cpu_s"] + 0.999))
    memory = int(limits["memory_bytes"])
    values: Sequence[tuple[int, int]] = (
        (resource.RLIMIT_CPU, cpu),
        # Address space is not memory: the watch over the whole tree sees what is really used.
        (resource.RLIMIT_AS, 2 * memory + (256 << 20)),
        (resource.RLIMIT_FSIZE, int(limits["file_bytes"])),
        # A few more than allowed, so that the watch sees who goes beyond.
        (resource.RLIMIT_NPROC, int(limits["processes"]) + 8 + others),
        (resource.RLIMIT_NOFILE, int(limits["open_files"])),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    )
    for kind, value in values:
        # One second more lets a process say that its CPU time is over.
        hard = value + 1 if kind == resource.RLIMIT_CPU else value
        allowed = resource.getrlimit(kind)[1]
        if allowed != resource.RLIM_INFINITY:
            hard = min(hard, allowed)
        resource.setrlimit(kind, (min(value, hard), hard))
