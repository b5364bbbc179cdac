"""Policies between hosts: network namespaces with links of a stated speed. Skipped, with a word,
where they cannot be made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.two_hosts import Hosts, NoNamespacesError
from ludic.distributed import weights_http
from ludic.distributed.weights_http import PolicyServer
from ludic.pipeline.policies import StoredPolicy
from ludic.pipeline.store import PipelineConfig
from ludic.plumbing import files
from tests.pipeline.fetching import PIECE

pytestmark = [pytest.mark.redis, pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SIZE = 40 * PIECE + 321
Fetching = Callable[[int], "subprocess.Popen[str]"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        entered = Hosts(2, mbit=20).__enter__()
    except NoNamespacesError as exc:
        pytest.skip(f"no network namespaces here: {exc}")
    yield entered
    entered.__exit__()


@pytest.fixture
def trainer(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicyServer]:
    for module in (files, weights_http):
        monkeypatch.setattr(module, "PIECE", PIECE)
    server = PolicyServer("key", hosts.address)
    yield server
    server.close()


@pytest.fixture
def policy(trainer: PolicyServer, tmp_path: Path) -> StoredPolicy:
    weights = tmp_path / "weights"
    weights.write_bytes(os.urandom(SIZE))
    return StoredPolicy(2, 1, 1, "/elsewhere", **trainer.offer(weights))


@pytest.fixture
def fetching(
    hosts: Hosts, config: PipelineConfig, policy: StoredPolicy, tmp_path: Path
) -> Iterator[Fetching]:
    """Starts a process on a host that fetches the policy."""
    started: list[subprocess.Popen[str]] = []

    def start(host: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.pipeline.fetching", config.url, config.run]
        command += [str(tmp_path / f"host-{host}"), hosts.addresses[host]]
        process = subprocess.Popen(
            hosts.command(host, [*command, json.dumps(asdict(policy))]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def some_has_come(part: Path, process: subprocess.Popen[str]) -> None:
    """Returns when a part of the policy is on a host."""
    while not part.is_file() or not part.stat().st_blocks:
        assert process.poll() is None
        time.sleep(0.01)


def test_two_hosts_take_each_piece_from_the_trainer_once(
    fetching: Fetching, trainer: PolicyServer, policy: StoredPolicy
) -> None:
    both = [fetching(0), fetching(1)]
    assert [line(process) for process in both] == [policy.checksum] * 2
    assert trainer.sent == SIZE


def test_a_link_that_is_cut_while_it_is_used_goes_on_when_it_is_mended(
    fetching: Fetching, hosts: Hosts, policy: StoredPolicy, tmp_path: Path
) -> None:
    process = fetching(0)
    some_has_come(tmp_path / "host-0" / f"{policy.checksum}.part", process)
    hosts.cut(0)
    time.sleep(1.0)
    assert process.poll() is None
    hosts.mend(0)
    assert line(process) == policy.checksum


def test_a_host_that_is_killed_half_way_holds_up_nobody(
    fetching: Fetching, trainer: PolicyServer, policy: StoredPolicy, tmp_path: Path
) -> None:
    killed, other = fetching(0), fetching(1)
    some_has_come(tmp_path / "host-0" / f"{policy.checksum}.part", killed)
    killed.kill()
    assert line(other) == policy.checksum
    again = fetching(0)
    assert line(again) == policy.checksum
    assert trainer.sent <= 2 * SIZE
