"""Hostile programs do no harm, are reported as what they were, and leave the pool working."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ludic.envs.code_exec.sandbox.base import Limits, RunResult, RunStatus
from ludic.envs.code_exec.sandbox.pool import SandboxPool
from tests.envs.code_exec import (
    attacks_on_neighbours,
    attacks_on_resources,
    attacks_on_the_host,
)
from tests.envs.code_exec.attack import Attack

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:the sandbox 'plain':RuntimeWarning"),
]

LIMITS = Limits(
    wall_s=30,
    cpu_s=20,
    memory_mb=256,
    processes=24,
    file_mb=8,
    disk_mb=16,
    files=512,
    output_kb=256,
)
ATTACKS = [
    *attacks_on_resources.ATTACKS,
    *attacks_on_the_host.ATTACKS,
    *attacks_on_neighbours.ATTACKS,
]
SECRET = "the-expected" + "-outputs"


@dataclass(frozen=True)
class Host:
    """What the attacks are after."""

    folder: Path
    port: int
    abstract: str


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("host")
    folder.chmod(0o777)
    secret = folder / "expected.txt"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    os.environ["LUDIC_ATTACK_SECRET"] = SECRET
    abstract = f"\0ludic-attack-{os.getpid()}"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind(abstract)
        unix.listen()
        yield Host(folder, tcp.getsockname()[1], abstract)
    del os.environ["LUDIC_ATTACK_SECRET"]


def command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


def run(pool: SandboxPool, attack: Attack, host: Host, token: str) -> RunResult:
    program = attack.source(
        secret=host.folder / "expected.txt",
        outside=host.folder / "outside",
        host_pid=os.getpid(),
        port=host.port,
        abstract=host.abstract.replace("\0", "\\0"),
        token=token,
    )
    endless = RunStatus.WALL_TIME in attack.reported
    limits = replace(LIMITS, wall_s=2, cpu_s=1.5) if endless else LIMITS
    return pool.run({"main.py": program}, ["python", "main.py"], b"", limits)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_does_no_harm_and_leaves_the_pool_working(
    pool: SandboxPool, host: Host, attack: Attack, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["pool"]
    if name == "plain" and attack.isolated:
        pytest.skip("a plain subprocess does not promise to hold this")
    token = f"ludic-attack-{os.getpid()}-{ATTACKS.index(attack)}"
    replaced = pool.replaced
    result = run(pool, attack, host, token)

    said = result.stdout + result.stderr
    assert b"HARM" not in result.stdout, said[-2000:]
    assert SECRET.encode() not in said
    assert result.status in attack.reported, (result.status, said[-2000:])
    assert not (host.folder / "outside").exists()
    assert stat.S_IMODE(os.stat("/usr").st_mode) == 0o755
    assert not any(token.encode() in line for line in command_lines())
    assert pool.replaced == replaced, "the worker did not survive"

    look = (
        b"import os, sys, json, builtins\nprint(sorted(os.listdir('.')), "
        b"builtins.open is open, os.listdir('/dev/shm'), __name__)"
    )
    after = pool.run({"main.py": look}, ["python", "main.py"])
    expected = {"bubblewrap": b"['.shm', 'main.py'] True [] __main__\n"}.get(name)
    assert after.status is RunStatus.OK, after.stderr
    if expected is None:
        assert after.stdout.startswith(b"['main.py'] True")
    else:
        assert after.stdout == expected


def test_there_are_enough_attacks() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 90
