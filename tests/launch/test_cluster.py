"""A launched run on a Ray cluster of three nodes, and what it survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludic.rollouts import read_rollouts, read_token_log
from ludic.runs.storage.folder import rollout_file, token_file

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
MANY, EPISODES = 10_000, 16
"""More updates than there is time for: how quick the machine is decides nothing."""
SMALL = (
    *("sft.steps=0", f"training.steps={MANY}", f"training.rollouts_per_update={EPISODES}"),
    *("training.checkpoint_every=1", "eval.episodes=4", 'logging.loggers=["console"]'),
    *(
        'model.device="cpu"',
        'inference.backend="vllm"',
        "pipeline.lease_s=5.0",
        "training.batch_timeout_s=600",
    ),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and two nodes with GPUs that are only numbers."""
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0})
    for _ in range(2):
        add_node(made)
    yield made
    made.shutdown()


def add_node(cluster: Any) -> None:
    """Adds a node. Ray gives one 30 s to start, which a busy machine may not keep to."""
    for attempt in range(5):
        try:
            cluster.add_node(num_cpus=4, num_gpus=2)
            return
        except Exception as exc:
            if attempt == 4 or "timed out during startup" not in str(exc):
                raise


def until(holds: Callable[[], object], what: str, seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)


def processes_of(folder: Path, word: str = "") -> list[int]:
    """The ids of the processes whose command names the folder, and a word after it or before."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
            state = (entry.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(folder) in words and (not word or word in words) and state != "Z":
            pids.append(int(entry.parent.name))
    return pids


def redis_of(folder: Path) -> list[int]:
    """The Redis servers that keep their data in the run's folder."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if entry.readlink() == folder / "redis":
                pids.append(int(entry.parent.name))
        except OSError:
            continue
    return pids


def events(folder: Path, role: str, what: str) -> list[dict[str, Any]]:
    file = folder / "launch" / "events.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    told = [json.loads(line) for line in lines]
    return [event for event in told if event["role"] == role and event["what"] == what]


def updates(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [int(row["train/step"]) for row in rows if "train/step" in row]


class Driver:
    """`ludic launch` on the cluster, as a user starts it."""

    def __init__(self, cluster: Any, log: Path, *words: str) -> None:
        self.log = log
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ludic.cli", "launch", *words],
                cwd=log.parent,
                env={**os.environ, "RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Waits for something that happens while the driver lives."""

        def happened() -> bool:
            assert self.process.poll() is None or holds(), self.log.read_text()
            return bool(holds())

        until(happened, what)

    def finished(self) -> str:
        """Waits for its end, and returns what it said."""
        status = self.process.wait(600)
        text = self.log.read_text()
        assert status == 0, text
        return text


def check_trained_once(folder: Path, steps: int) -> None:
    """Every update there was, from whole groups, and no episode in two of them."""
    assert sorted(set(updates(folder))) == list(range(1, steps + 1))
    trained: dict[str, set[int]] = {}
    for record in read_token_log(token_file(folder / "rollouts")):
        trained.setdefault(record.rollout_id, set()).add(record.update)
    doubled = [name for name, seen in trained.items() if len(seen) > 1]
    assert not doubled
    per_update = Counter(update for seen in trained.values() for update in seen)
    assert per_update == dict.fromkeys(range(1, steps + 1), EPISODES), "none lost"
    stored = Counter(r.id for r in read_rollouts(rollout_file(folder / "rollouts", "train")))
    assert max(stored.values()) == 1
    assert trained.keys() <= stored.keys()


def test_a_run_goes_on_when_an_actor_a_server_a_rank_a_node_and_its_driver_are_killed(
    cluster: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    roles = 'trainer_nodes=2, servers=2, server_engine="local", actors_min=3, restarts=5'
    table = f"cluster={{{roles}}}"
    driver = Driver(cluster, tmp_path / "log", "tic-tac-toe", "--out", str(folder), table, *SMALL)
    try:
        driver.until(lambda: updates(folder), "the first update")
        secrets = [folder / "pipeline.json", folder / "launch" / "secrets.json"]
        assert all(file.stat().st_mode & 0o077 == 0 for file in secrets)

        (actor,) = processes_of(folder, "actor-1")
        os.kill(actor, signal.SIGKILL)
        driver.until(lambda: len(events(folder, "actor-1", "placed")) == 2, "the actor's return")

        (server,) = processes_of(folder, "server-1")
        os.kill(server, signal.SIGKILL)
        driver.until(lambda: len(events(folder, "server-1", "placed")) == 2, "the server's return")

        ranks = processes_of(folder, "--resume")
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        driver.until(lambda: len(events(folder, "trainer", "placed")) == 2, "the ranks' return")
        assert not set(ranks) & set(processes_of(folder)), "all ranks were stopped"

        nodes = " ".join(events(folder, "trainer", "placed")[-1]["nodes"])
        lost = next(node for node in cluster.worker_nodes if node.node_id[:6] in nodes)
        add_node(cluster)
        cluster.remove_node(lost, allow_graceful=False)
        driver.until(lambda: len(events(folder, "trainer", "placed")) == 3, "the ranks elsewhere")

        done = len(updates(folder))
        driver.until(lambda: len(updates(folder)) > done, "another update")
        driver.process.kill()
        until(lambda: not processes_of(folder) and not redis_of(folder), "everything to end", 60.0)
    finally:
        driver.process.kill()
    assert not (folder / "summary.json").exists(), "it was killed on the way"
    steps = max(updates(folder)) + 3
    again = Driver(cluster, tmp_path / "log", "--resume", str(folder), f"training.steps={steps}")
    try:
        assert "trainer has finished" in again.finished()
    finally:
        again.process.kill()
    check_trained_once(folder, steps)
    until(lambda: not processes_of(folder) and not redis_of(folder), "everything to end", 60.0)
    assert not any(file.exists() for file in secrets)
