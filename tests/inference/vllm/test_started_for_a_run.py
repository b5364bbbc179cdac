"""Runs with a real vLLM server that they start for themselves: of `ludic train`, which ends it, and
of `ludic launch` on a Ray cluster of this host, where it is killed once.

Ray is in an environment of its own, as vLLM is: `make test-vllm` names it in LUDIC_RAY_PYTHON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ludic.inference.vllm.server import free_port
from tests.inference.vllm.conftest import ENV, ROOT, VLLM_PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

RUN = """\
[env]
kind = "key_door"

[inference]
backend = "vllm"
slots = 8
max_context_tokens = 512

[inference.sampling]
max_tokens = 8

[inference.vllm]
start_timeout_s = 1500

[algorithm]
name = "reinforce"

[training]
steps = 100000
rollouts_per_update = 4
max_steps = 1
max_seq_len = 512
learning_rate = 1e-3
{training}

[eval]
episodes = 2

[model]
{model}
"""
TINY = "kwargs = { hidden_size = 64, heads = 2, kv_heads = 1 }"
ON_A_CLUSTER = """\
checkpoint_every = 1
max_lag = 0
batch_timeout_s = 1500

[cluster]
servers = 1
gpus_per_server = 0
actors_min = 1
variables = {variables}
"""


@contextmanager
def command(log: Path, *words: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the folder of its log, which this ends if it has not ended by itself."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with open(log, "ab") as output:
        process = subprocess.Popen(
            words,
            cwd=log.parent,
            env={**os.environ, **ENV, "PYTHONPATH": path, "LUDIC_VLLM_PYTHON": VLLM_PYTHON, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def training(where: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`ludic train` in a folder, and the file of what it says."""
    (where / "run.toml").write_text(RUN.format(training="", model=TINY))
    words = (sys.executable, "-m", "ludic", "train", "run.toml", "--out", "run", *more)
    with command(where / "said.log", *words) as process:
        yield process, where / "said.log"


def until(
    process: subprocess.Popen[bytes], said: Path, what: str, holds: Callable[[], object]
) -> None:
    """Returns when something holds, for which the process must not end."""
    deadline = time.monotonic() + 1500
    while not holds():
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < deadline, f"no {what}: {said.read_text()}"
        time.sleep(0.2)


def updates(run: Path) -> list[dict[str, float]]:
    """What was written of each update that is done; a line may be half there."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def check(lines: list[dict[str, float]]) -> None:
    """None is missing or doubled, and each was trained on what the server sampled."""
    assert [line["train/version"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["train/mismatch_max"] <= 1e-3 for line in lines)


def processes() -> dict[int, list[str]]:
    """All of this machine's, by number, with their command lines."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands[int(path.parent.name)] = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # ended this moment
            continue
    return commands


def working_in(folder: Path) -> list[list[str]]:
    """The command lines of the processes that work in a folder."""

    def works_there(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/cwd").readlink() == folder
        except OSError:
            return False

    return [words for pid, words in processes().items() if works_there(pid)]


def check_that_nobody_is_left(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while left := working_in(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_a_run_trains_with_a_server_of_its_own_which_ctrl_c_ends_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(tmp_path) as (process, said):
        until(process, said, "second update", lambda: len(updates(run)) >= 2)
        served = {str(run / "vllm"), "run/vllm"}
        assert any(served & set(words) for words in working_in(tmp_path))
        process.send_signal(signal.SIGINT)
        process.wait(600)
    assert "starting a vLLM server for this run; this takes a minute" in said.read_text()
    check(updates(run))
    log = (run / "vllm/server.log").read_text()
    assert "'max_model_len': 512" in log
    assert "'max_num_seqs': 8" in log
    assert list((run / "checkpoints/rl").glob("step-*")), said.read_text()
    check_that_nobody_is_left(tmp_path)


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    with training(tmp_path, "inference.max_context_tokens=100000") as (process, log):
        assert process.wait(1700) != 0
    said = log.read_text()
    assert re.search(r"vLLM \S+ ended with status \d+ before it was healthy", said), said
    assert "max_model_len" in said
    assert (tmp_path / "run-server.log").is_file()
    assert not (tmp_path / "run").exists()


def python_with_ray() -> str:
    """The Python that has Ray; skips the test where nobody said that there must be one."""
    if named := os.environ.get("LUDIC_RAY_PYTHON"):
        return named
    usual = ROOT / ".venv-adapters/bin/python"
    if not usual.is_file():
        pytest.skip("without Ray: `make adapters` installs it")
    return str(usual)


def test_a_vllm_server_under_ray_is_killed_and_samples_again(
    model_folder: Path, tmp_path: Path
) -> None:
    python, run = python_with_ray(), tmp_path / "run"
    settings = ON_A_CLUSTER.format(variables=json.dumps([*ENV, "LUDIC_VLLM_PYTHON"]))
    text = RUN.format(training=settings, model=f'name = "{model_folder}"')
    (tmp_path / "run.toml").write_text(text)
    port, said = free_port(), tmp_path / "said.log"
    head = [python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
    head += ["--num-cpus", "8", "--num-gpus", "0"]
    head += ["--include-dashboard", "false", "--disable-usage-stats"]
    launch = [python, "-m", "ludic", "launch", "run.toml", "--out", str(run)]

    def placed() -> list[str]:
        file = run / "launch/events.jsonl"
        events = map(json.loads, file.read_text().splitlines()) if file.is_file() else ()
        return [event["role"] for event in events if event["what"] == "placed"]

    with (
        command(tmp_path / "ray.log", *head, RAY_worker_niceness="0"),
        command(said, *launch, RAY_ADDRESS=f"127.0.0.1:{port}") as driver,
    ):
        until(driver, said, "second update", lambda: len(updates(run)) >= 2)
        url = re.findall(r"http://[\d.]+:\d+", (run / "logs/server-1.log").read_text())[-1]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/update_weights", b"{}", timeout=60)
        roles = processes().items()
        (server,) = (pid for pid, words in roles if {"server-1", str(run)} <= set(words))
        os.kill(server, signal.SIGKILL)
        until(driver, said, "server started again", lambda: placed().count("server-1") == 2)
        done = len(updates(run))
        until(driver, said, "update with it", lambda: len(updates(run)) >= done + 2)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(600) == 0, said.read_text()
    check(updates(run))
    assert placed().count("trainer") == 1, said.read_text()  # it waited, and was not resumed
    assert "stopped; resume it with" in said.read_text()
    check_that_nobody_is_left(tmp_path)
