"""The filters of both architectures, run by a small interpreter of BPF."""

from __future__ import annotations

import errno
import platform
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.envs.code_exec.sandbox import seccomp
from ludic.envs.code_exec.sandbox.inside import OWN_PID
from ludic.envs.code_exec.sandbox.seccomp import (
    ALLOW,
    ARCHITECTURES,
    CLONE,
    CLONE3,
    ERRNO,
    IOCTL,
    KILL_PROCESS,
    NEEDED_BY_WORKER,
    REFUSED,
    SIGNALS,
    SOCKET,
    FilterFor,
    build_filter,
)
from ludic.errors import ConfigError

PERM = ERRNO | errno.EPERM
PURPOSES: tuple[FilterFor, ...] = ("worker", "program", "plain")
both = pytest.mark.parametrize("machine", ARCHITECTURES)


def decide(program: bytes, number: int, *args: int, arch: int) -> int:
    """What the kernel would do with a system call: the few instructions that filters need."""
    padded = (*args, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("<iIQ6Q", number, arch, 0, *(a & (1 << 64) - 1 for a in padded))
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    for _ in range(len(instructions)):
        code, if_true, if_false, value = instructions[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return int(value)
        else:
            test = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            at += if_true if test else if_false
    raise AssertionError("the filter does not end")


@both
@pytest.mark.parametrize("purpose", PURPOSES)
def test_what_is_refused_fails_with_eperm_and_the_rest_is_allowed(
    purpose: FilterFor, machine: str
) -> None:
    column, arch = list(ARCHITECTURES).index(machine), ARCHITECTURES[machine]
    program = build_filter(purpose, machine)
    for name, numbers in REFUSED.items():
        number = numbers[column]
        if number is not None:
            assert decide(program, number, arch=arch) == PERM, name
    for name, numbers in NEEDED_BY_WORKER.items():
        expected = ALLOW if purpose == "worker" else PERM
        assert decide(program, numbers[column] or 0, arch=arch) == expected, name
    decided = {numbers[column] for numbers in (*REFUSED.values(), *NEEDED_BY_WORKER.values())}
    decided |= {pair[column] for pair in (CLONE, CLONE3, SOCKET, IOCTL)}
    decided |= {numbers[column] for numbers in SIGNALS.values()}
    for number in set(range(seccomp.NEWER_THAN_TABLE)) - decided:
        assert decide(program, number, arch=arch) == ALLOW, number


@both
@pytest.mark.parametrize("purpose", ["program", "plain"])
def test_calls_are_judged_by_their_arguments(purpose: FilterFor, machine: str) -> None:
    column, arch = list(ARCHITECTURES).index(machine), ARCHITECTURES[machine]
    program = build_filter(purpose, machine)
    fork, thread = 0x01200011, 0x003D0F00
    for flags, expected in (
        (fork, ALLOW), (thread, ALLOW), (0x10000000 | 17, PERM), (0x20000000, PERM),
        (0x40000000 | fork, PERM), (0x00020000, PERM),
    ):  # fmt: skip
        assert decide(program, CLONE[column], flags, arch=arch) == expected, hex(flags)
    assert decide(program, CLONE3[column], arch=arch) == ERRNO | errno.ENOSYS
    for family in range(64):
        expected = ALLOW if family == 1 else PERM
        assert decide(program, SOCKET[column], family, arch=arch) == expected
    assert decide(program, IOCTL[column], 0, 0x5412, arch=arch) == PERM
    assert decide(program, IOCTL[column], 0, 0x5413, arch=arch) == ALLOW


@both
def test_without_a_pid_namespace_signals_go_to_oneself_only(machine: str) -> None:
    column, arch = list(ARCHITECTURES).index(machine), ARCHITECTURES[machine]
    for name, numbers in SIGNALS.items():
        number = numbers[column] or 0
        assert decide(build_filter("program", machine), number, 7, arch=arch) == ALLOW, name
        plain = build_filter("plain", machine)
        for pid, expected in ((OWN_PID, ALLOW), (0, ALLOW), (1, PERM), (-1, PERM), (7, PERM)):
            assert decide(plain, number, pid, arch=arch) == expected, (name, pid)


@both
@given(number=st.integers(0, 2**31 - 1), arch=st.integers(0, 2**32 - 1))
def test_no_other_architecture_and_no_newer_call_gets_through(
    machine: str, number: int, arch: int
) -> None:
    program = build_filter("program", machine)
    own = ARCHITECTURES[machine]
    if arch != own:
        assert decide(program, number, arch=arch) == KILL_PROCESS
    if number >= seccomp.NEWER_THAN_TABLE:
        x32 = machine == "x86_64" and number >= seccomp.X32_BIT
        expected = KILL_PROCESS if x32 else ERRNO | errno.ENOSYS
        assert decide(program, number, arch=own) == expected


def test_the_table_has_the_numbers_of_this_machines_headers() -> None:
    folder = f"/usr/include/{platform.machine()}-linux-gnu/asm/unistd_64.h"
    header = Path("/usr/include/asm-generic/unistd.h")
    if platform.machine() == "x86_64":
        header = Path(folder)
    if not header.exists():
        pytest.skip("the kernel's headers are not on this machine")
    found = {
        name: int(number)
        for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", header.read_text())
    }
    column = list(ARCHITECTURES).index(platform.machine())
    table = {**REFUSED, **NEEDED_BY_WORKER, **SIGNALS, "clone": CLONE, "socket": SOCKET}
    checked = {name: pair[column] for name, pair in table.items() if name in found}
    assert len(checked) > 50
    assert checked == {name: found[name] for name in checked}


def test_a_machine_without_a_filter_is_refused() -> None:
    with pytest.raises(ConfigError, match="riscv64"):
        build_filter("program", "riscv64")
