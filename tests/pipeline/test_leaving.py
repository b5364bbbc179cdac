"""How actors end: with the run, with its trainer, when told to, and when their units are gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ludic.distributed.shared_folders import OwnedFolder, shared_folder
from ludic.errors import PipelineError
from ludic.launch import supervisor
from ludic.pipeline import LocalRedis, PipelineConfig
from ludic.pipeline.store import Store
from ludic.runs.pipeline import training
from ludic.runs.pipeline.roles import Environment, actor_role
from ludic.runs.pipeline.training import RunPipeline
from ludic.runs.run import Run
from tests.pipeline.test_async_run import SMALL, environment, ludic
from tests.pipeline.test_batch_source import acting, announced, until
from tests.pipeline.world import act, make_source

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.redis
async def test_an_actor_gives_up_at_once_when_the_run_has_ended(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    await source.open()
    await source._ask_more()
    async with acting(config, latency_s=600.0) as tasks:
        await until(lambda: store.facts()["leased"] == 4)
        await source.close("its updates are done")
        await asyncio.wait(tasks, timeout=60)
        report = tasks[0].result()
    assert (report.why, report.groups) == ("the run has ended: its updates are done", 0)


@pytest.mark.redis
async def test_an_actor_gives_up_units_that_another_has_taken_over(
    config: PipelineConfig, store: Store
) -> None:
    source = await announced(make_source(config))
    await source.open()
    await source._ask_more()
    async with acting(config, latency_s=600.0, name="slow") as tasks:
        await until(lambda: store.facts()["leased"] == 4)
        assert len(store.run("take", "quick", 10, 0, "0-0")[1]) == 4
        await until(lambda: '"busy": 0' in store.facts()["actors"]["slow"])
    assert tasks[0].result().refused == {"taken over": 4}
    assert store.facts()["leased"] == 4, "they are the other's"
    await source.close()


@pytest.mark.redis
async def test_an_actor_that_is_told_to_stop_does_not_wait_for_a_dead_redis(
    own_server: LocalRedis,
) -> None:
    config = PipelineConfig(own_server.url, "stop", patience_s=3600.0, call_s=1.0)
    source = await announced(make_source(config))
    await source.open()
    stop = asyncio.Event()
    actor = asyncio.create_task(act(config, stop=stop, stop_s=1.0))
    store = Store(config)
    await until(lambda: store.facts()["actors"])
    store.close()
    await asyncio.to_thread(own_server.kill)
    await asyncio.sleep(1.0)
    assert not actor.done(), "it is waited for, until somebody says otherwise"
    stop.set()
    report = await asyncio.wait_for(actor, 60)
    assert report.why == "it was told to stop, and Redis does not answer"
    source.lease.store.hurry(0.0)
    await source.close()


ORPHAN = """
import os, subprocess, sys
from ludic.workers import watched_process
watched_process.ENDS_WITHIN_S = 1
child = subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
watched_process.end_with_us(child.pid)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc here")
def test_a_child_that_ignores_the_word_ends_with_its_parent_all_the_same() -> None:
    parent = subprocess.run(
        [sys.executable, "-c", ORPHAN], env=environment(), capture_output=True, timeout=100
    )
    child = int(parent.stdout)
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline, "it outlives its parent"
        time.sleep(0.1)


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actors: int, command: str) -> RunPipeline:
    """A run whose actors are this Python program."""
    config = Run.from_file("tic-tac-toe", [f"pipeline.actors={actors}"]).config
    pipeline = RunPipeline(config, tmp_path, lambda: None)  # type: ignore[arg-type, return-value]
    for number in range(1, actors + 1):
        role = actor_role(Environment(tmp_path), number)
        pipeline._actors.add(replace(role, command=(sys.executable, "-c", command)))
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    return pipeline


async def test_an_actor_that_is_not_started_again_is_said_aloud_and_the_last_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(training, "warn", warnings.append)
    pipeline = made(tmp_path, monkeypatch, 2, "print('no such model'); raise SystemExit(3)")
    pipeline._tending = asyncio.create_task(pipeline._tend())
    try:
        await until(lambda: pipeline._failure, 100)
    finally:
        pipeline._tending.cancel()
    assert sum("is started again" in line for line in warnings) == 2 * 3
    last = [line for line in warnings if "NOT started again" in line]
    assert len(last) == 2
    assert "1 of 2 are left. It ended with status 3: no such model" in last[0]
    assert "0 of 2 are left" in last[1]
    with pytest.raises(PipelineError, match=r"no actor is left: .*no such model"):
        pipeline._alarm()


async def test_supervision_that_ends_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = made(tmp_path, monkeypatch, 1, "")

    def refuse() -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(pipeline._actors, "tick", refuse)
    pipeline._tending = asyncio.create_task(pipeline._tend())
    await until(pipeline._tending.done, 60)
    with pytest.raises(PipelineError, match=r"watches the actors failed.*no more processes"):
        pipeline._alarm()


def processes_of(folder: Path) -> list[int]:
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in line.read_text(errors="replace"):
                found.append(int(line.parent.name))
        except OSError:
            continue
    return [pid for pid in found if is_running(pid)]


@pytest.mark.redis
@pytest.mark.integration
@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc here")
def test_actors_end_with_a_trainer_that_was_killed_and_the_next_removes_its_weights(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    settings = (*SMALL, "training.steps=1000", "pipeline.actors=2")
    run = subprocess.Popen(
        ludic("train", "tic-tac-toe", "--async", "--out", str(out), *settings),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 240
        while not (out / "metrics.jsonl").is_file() or len(processes_of(out)) < 3:
            assert run.poll() is None
            assert time.monotonic() < deadline, "the run does not begin"
            time.sleep(0.2)
        (policies,) = shared_folder().glob(f"ludic-publish-{run.pid}-*")
        OwnedFolder().close()
        assert list(policies.glob("policy-*.safetensors")), (
            "somebody else's stay while they are used"
        )
        os.kill(run.pid, signal.SIGKILL)
        run.wait(30)
        deadline = time.monotonic() + 60
        while left := processes_of(out):
            assert time.monotonic() < deadline, f"{left} outlive their trainer"
            time.sleep(0.2)
        OwnedFolder().close()
        assert not policies.exists()
    finally:
        run.kill()
