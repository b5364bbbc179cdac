"""A launched run on a Ray cluster of three nodes, and what it survives."""

from __future__ import annotations

import json
import os
import random
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
from ludic.runs.storage import rollout_file, token_file

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
ROLES = (
    'cluster={trainer_nodes=2, servers=2, server_engine="local", actors_min=3, restarts=30, '
    "patience_s=600}"
)
SERVERS, ACTORS = ("server-1", "server-2"), ("actor-1", "actor-2", "actor-3")
KILLED = ("actor", "server", "rank", "node", "redis", "driver")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and two nodes with GPUs that are only numbers."""
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
    # Ray would have everybody else on the machine come first.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
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
                [sys.executable, "-m", "ludic", "launch", *words],
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


def lost_and_doubled(folder: Path, steps: int) -> tuple[int, int]:
    """How many episodes are missing from the updates, and how many are in more than one."""
    trained: dict[str, set[int]] = {}
    for record in read_token_log(token_file(folder / "rollouts")):
        trained.setdefault(record.rollout_id, set()).add(record.update)
    per_update = Counter(update for seen in trained.values() for update in seen)
    lost = sum(max(EPISODES - per_update[step], 0) for step in range(1, steps + 1))
    stored = Counter(r.id for r in read_rollouts(rollout_file(folder / "rollouts", "train")))
    lost += len(trained.keys() - stored.keys())
    in_two = {name for name, seen in trained.items() if len(seen) > 1}
    return lost, len(in_two | {name for name, count in stored.items() if count > 1})


def check_trained_once(folder: Path, steps: int) -> None:
    """Every update there was, from whole groups, and no episode in two of them."""
    assert sorted(set(updates(folder))) == list(range(1, steps + 1))
    assert lost_and_doubled(folder, steps) == (0, 0)


def test_a_run_goes_on_when_an_actor_a_server_a_rank_a_node_and_its_driver_are_killed(
    cluster: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    driver = Driver(cluster, tmp_path / "log", "tic-tac-toe", "--out", str(folder), ROLES, *SMALL)
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


class Chaos:
    """Kills one part of a run after the other, and writes down how long each was away."""

    def __init__(self, cluster: Any, tmp_path: Path, seed: int) -> None:
        self.cluster, self.folder, self.log = cluster, tmp_path / "run", tmp_path / "log"
        self.random = random.Random(seed)
        self.seconds: dict[str, list[float]] = {}
        words = ("tic-tac-toe", "--out", str(self.folder), ROLES, *SMALL, f"run.seed={seed}")
        self.driver = Driver(cluster, self.log, *words)

    def kill(self, what: str) -> None:
        """Kills one of a kind, and waits until it runs again."""
        again, kill = getattr(self, f"a_{what}")()
        event = "restarted" if what == "redis" else "placed"

        def counted() -> list[int]:
            return [len(events(self.folder, role, event)) for role in again]

        before, began = counted(), time.monotonic()
        kill()
        self.driver.until(
            lambda: all(now > then for now, then in zip(counted(), before, strict=True)),
            f"the return of {again}",
        )
        self.seconds.setdefault(what, []).append(round(time.monotonic() - began, 1))

    def until_the_next_update(self) -> None:
        done = max(updates(self.folder), default=0)
        self.driver.until(lambda: max(updates(self.folder), default=0) > done, "an update")

    def process(self, word: str) -> Callable[[], None]:
        """The kill of a process whose command has this word, as soon as there is one."""
        self.driver.until(lambda: processes_of(self.folder, word), f"a process {word}")
        pid = self.random.choice(sorted(processes_of(self.folder, word)))
        return lambda: os.kill(pid, signal.SIGKILL)

    def a_actor(self) -> tuple[list[str], Callable[[], None]]:
        name = self.random.choice(ACTORS)
        return [name], self.process(name)

    def a_server(self) -> tuple[list[str], Callable[[], None]]:
        name = self.random.choice(SERVERS)
        return [name], self.process(name)

    def a_rank(self) -> tuple[list[str], Callable[[], None]]:
        return ["trainer"], self.process("train")

    def a_redis(self) -> tuple[list[str], Callable[[], None]]:
        self.driver.until(lambda: redis_of(self.folder), "a Redis")
        (pid,) = redis_of(self.folder)
        return ["redis"], lambda: os.kill(pid, signal.SIGKILL)

    def a_node(self) -> tuple[list[str], Callable[[], None]]:
        """One that has roles; another joins first, so that there is room for them."""
        places = {
            role: " ".join(placed[-1]["nodes"])
            for role in ("trainer", *SERVERS, *ACTORS)
            if (placed := events(self.folder, role, "placed"))
        }
        nodes = [n for n in self.cluster.worker_nodes if n.node_id[:6] in str(places)]
        lost = self.random.choice(nodes)
        add_node(self.cluster)
        again = [role for role, place in places.items() if lost.node_id[:6] in place]
        return again, lambda: self.cluster.remove_node(lost, allow_graceful=False)

    def a_driver(self) -> tuple[list[str], Callable[[], None]]:
        def kill() -> None:
            self.driver.process.kill()
            self.driver.process.wait()
            until(self.nothing_is_left, "everything to end", 120.0)
            self.driver = Driver(self.cluster, self.log, "--resume", str(self.folder))

        return ["trainer"], kill

    def nothing_is_left(self) -> bool:
        return not processes_of(self.folder) and not redis_of(self.folder)


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("seed", [0, 1])
def test_twenty_kills_lose_nothing_and_double_nothing(
    cluster: Any, tmp_path: Path, seed: int
) -> None:
    chaos = Chaos(cluster, tmp_path, seed)
    folder, drawn, first = chaos.folder, chaos.random, list(KILLED)
    drawn.shuffle(first)
    began = time.monotonic()
    try:
        chaos.driver.until(lambda: updates(folder), "the first update")
        for what in (*first, *(drawn.choice(KILLED) for _ in range(20 - len(first)))):
            if drawn.random() < 0.7:  # and else while it is still coming up from the last one
                chaos.until_the_next_update()
            time.sleep(drawn.uniform(0.0, 3.0))
            chaos.kill(what)
            print(what, chaos.seconds[what][-1], "s, update", max(updates(folder), default=0))
        chaos.until_the_next_update()
        chaos.driver.process.kill()
        until(chaos.nothing_is_left, "everything to end", 120.0)
    finally:
        chaos.driver.process.kill()
    steps = max(updates(folder)) + 3
    last = Driver(cluster, chaos.log, "--resume", str(folder), f"training.steps={steps}")
    try:
        last.finished()
    finally:
        last.process.kill()
    lost, doubled = lost_and_doubled(folder, steps)
    figures = {
        "seed": seed,
        "kills": sum(map(len, chaos.seconds.values())),
        "seconds_from_kill_to_return": chaos.seconds,
        "updates": steps,
        "lost": lost,
        "doubled": doubled,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(figures))
    check_trained_once(folder, steps)
    until(chaos.nothing_is_left, "everything to end", 120.0)
