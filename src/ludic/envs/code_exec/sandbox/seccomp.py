"""The seccomp filters, as the bytes of their BPF programs, for x86_64 and aarch64.

What is refused: looking into other processes, namespaces and mounts, sockets other than Unix ones,
memory that no resource limit sees, keys, clocks, modules and the kernel's larger doors (BPF,
io_uring, perf, userfaultfd). A refused call fails with EPERM; the calls that C libraries have an
older way around, and those newer than the table, fail with ENOSYS. A call of another architecture
ends the process.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import Literal

from ludic.envs.code_exec.sandbox.inside import OWN_PID
from ludic.errors import ConfigError

FilterFor = Literal["worker", "program", "plain"]

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEWER_THAN_TABLE = 450
X32_BIT = 0x40000000

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

CLONE_NEW = 0x7E020000
AF_UNIX = 1
TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

# name: (x86_64, aarch64); None where an architecture does not have it.
REFUSED: dict[str, tuple[int, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18), "vhangup": (153, 58), "personality": (135, 92),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
    "ustat": (136, None), "sysfs": (139, None), "_sysctl": (156, None),
}  # fmt: skip
NEEDED_BY_WORKER: dict[str, tuple[int, int | None]] = {"unshare": (272, 97), "mount": (165, 40)}
"""Refused to programs only: the worker makes their namespaces with these."""

SIGNALS: dict[str, tuple[int, int]] = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "prlimit64": (302, 261),
}  # fmt: skip
"""Without a PID namespace, allowed on the program's first process only (or 0, oneself)."""

CLONE, CLONE3, SOCKET, IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)


def build_filter(purpose: FilterFor, machine: str | None = None) -> bytes:
    """The filter for the worker, for a program in a sandbox, or for a program without one."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ConfigError(
            f"there is no seccomp filter for {machine!r}, only for {sorted(ARCHITECTURES)}: "
            "programs cannot be confined on this machine"
        )
    column = list(ARCHITECTURES).index(machine)
    filled = _Filter()
    filled.add(_LOAD, 4)
    filled.add(_EQUAL, ARCHITECTURES[machine], 1, 0)
    filled.add(_RETURN, KILL_PROCESS)
    filled.add(_LOAD, 0)
    if machine == "x86_64":
        filled.add(_GREATER_EQUAL, X32_BIT, 0, 1)
        filled.add(_RETURN, KILL_PROCESS)
    filled.add(_GREATER_EQUAL, NEWER_THAN_TABLE, 0, 1)
    filled.add(_RETURN, ERRNO | errno.ENOSYS)
    filled.refuse(CLONE3[column], errno.ENOSYS)
    refused = REFUSED if purpose == "worker" else {**REFUSED, **NEEDED_BY_WORKER}
    for numbers in refused.values():
        number = numbers[column]
        if number is not None:
            filled.refuse(number, errno.EPERM)
    if purpose != "worker":
        filled.check(CLONE[column], 0, _ANY_BIT, (CLONE_NEW,), refuse_match=True)
        filled.check(SOCKET[column], 0, _EQUAL, (AF_UNIX,), refuse_match=False)
    filled.check(IOCTL[column], 1, _EQUAL, TERMINAL_INJECTION, refuse_match=True)
    if purpose == "plain":
        for numbers in SIGNALS.values():
            filled.check(numbers[column], 0, _EQUAL, (0, OWN_PID), refuse_match=False)
    filled.add(_RETURN, ALLOW)
    return filled.program()


class _Filter:
    """Instructions, one after another; the accumulator holds the call's number in between."""

    def __init__(self) -> None:
        self._instructions: list[bytes] = []

    def add(self, code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        self._instructions.append(struct.pack("=HBBI", code, if_true, if_false, value))

    def refuse(self, number: int, error: int) -> None:
        self.add(_EQUAL, number, 0, 1)
        self.add(_RETURN, ERRNO | error)

    def check(
        self, number: int, argument: int, test: int, values: tuple[int, ...], *, refuse_match: bool
    ) -> None:
        """Decides the call `number` by the lower half of one argument."""
        on_match, otherwise = ALLOW, ERRNO | errno.EPERM
        if refuse_match:
            on_match, otherwise = otherwise, on_match
        self.add(_EQUAL, number, 0, 1 + 2 * len(values) + 1)
        self.add(_LOAD, 16 + 8 * argument)
        for value in values:
            self.add(test, value, 0, 1)
            self.add(_RETURN, on_match)
        self.add(_RETURN, otherwise)

    def program(self) -> bytes:
        return b"".join(self._instructions)
