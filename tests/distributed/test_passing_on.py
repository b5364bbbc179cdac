"""Three hosts, each a process, over real sockets: what leaves the trainer, and what a bad host
costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludic.distributed import weights_http
from ludic.distributed.weights_http import PolicyServer
from ludic.plumbing import files
from tests.distributed.fetching_host import PIECE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SIZE = 40 * PIECE + 321


class Host:
    """A process that fetches what it is told to."""

    def __init__(self, folder: Path, manner: str = "well", piece_s: float = 60.0) -> None:
        folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.fetching_host", folder, manner, str(piece_s)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, source: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[str, list[str]]:
        """The checksum of what it has, and whom it left."""
        assert self.process.stdout is not None
        checksum, left = json.loads(self.process.stdout.readline())
        return checksum, left


Starting = Callable[..., Host]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Starting]:
    started: list[Host] = []

    def start(*options: Any) -> Host:
        started.append(Host(tmp_path / f"host-{len(started)}", *options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate(timeout=30)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicyServer]:
    for module in (files, weights_http):
        monkeypatch.setattr(module, "PIECE", PIECE)
    server = PolicyServer("key")
    yield server
    server.close()


def weights(trainer: PolicyServer, path: Path) -> dict[str, Any]:
    path.write_bytes(os.urandom(SIZE))
    return trainer.offer(path)


def test_three_hosts_cost_the_trainer_about_one_copy_publish_after_publish(
    host: Starting, trainer: PolicyServer, tmp_path: Path
) -> None:
    hosts = [host(), host(), host()]
    for number in (1, 2):
        source, before = weights(trainer, tmp_path / f"weights-{number}"), trainer.sent
        for one in hosts:
            one.tell(source)
        assert [one.answer() for one in hosts] == [(source["checksum"], [])] * 3
        assert SIZE <= trainer.sent - before <= 1.3 * SIZE


@pytest.mark.parametrize(("manner", "piece_s"), [("killed", 60), ("wrong", 60), ("slow", 0.5)])
def test_a_host_that_dies_half_way_sends_wrong_bytes_or_is_slow_is_left_for_the_trainer(
    host: Starting, trainer: PolicyServer, tmp_path: Path, manner: str, piece_s: float
) -> None:
    source = weights(trainer, tmp_path / "weights")
    bad, good = host(manner), host("well", piece_s)
    bad.tell(source)
    assert bad.answer() == (source["checksum"], [])
    assert trainer.sent == SIZE
    good.tell(source)
    checksum, left = good.answer()
    assert checksum == source["checksum"]
    assert len(left) == 1, "once, and never again for these weights"
    assert trainer.sent <= 2 * SIZE
    assert (bad.process.wait(30) < 0) if manner == "killed" else (bad.process.poll() is None)
    third = host("well", piece_s)
    third.tell(source)
    assert third.answer()[0] == source["checksum"]
