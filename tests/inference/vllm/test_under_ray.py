"""`ludic launch` on a Ray cluster of this host, with a real vLLM server that is killed once.

Ray is in an environment of its own, as vLLM is: `make test-vllm` names it in LUDIC_RAY_PYTHON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
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
[model]
name = "{model}"

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
checkpoint_every = 1
max_lag = 0
batch_timeout_s = 1500

[eval]
episodes = 2

[cluster]
servers = 1
gpus_per_server = 0
actors_min = 1
variables = {variables}
"""


def python_with_ray() -> str:
    """The Python that has Ray; skips the test where nobody said that there must be one."""
    if named := os.environ.get("LUDIC_RAY_PYTHON"):
        return named
    usual = ROOT / ".venv-adapters/bin/python"
    if not usual.is_file():
        pytest.skip("without Ray: `make adapters` installs it")
    return str(usual)


@contextmanager
def command(log: Path, *words: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that this ends if it has not ended by itself."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with open(log, "ab") as output:
        process = subprocess.Popen(
            words,
            cwd=log.parent,
            env={**os.environ, **ENV, "PYTHONPATH": path, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
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


def test_a_vllm_server_under_ray_is_killed_and_samples_again(
    model_folder: Path, tmp_path: Path
) -> None:
    python, run = python_with_ray(), tmp_path / "run"
    variables = {**ENV, "LUDIC_VLLM_PYTHON": VLLM_PYTHON}
    text = RUN.format(model=model_folder, variables=json.dumps([*variables]))
    (tmp_path / "run.toml").write_text(text)
    ray = (python, "-m", "ray.scripts.scripts")
    port, said = free_port(), tmp_path / "said.log"
    head = [*ray, "start", "--head", "--block", "--port", str(port), "--num-cpus", "8"]
    head += ["--num-gpus", "0", "--include-dashboard", "false", "--disable-usage-stats"]
    launch = [python, "-m", "ludic", "launch", "run.toml", "--out", str(run)]

    def updates() -> int:
        file = run / "metrics.jsonl"
        return file.read_text().count("\n") if file.is_file() else 0

    def placed() -> list[str]:
        file = run / "launch/events.jsonl"
        events = map(json.loads, file.read_text().splitlines()) if file.is_file() else ()
        return [event["role"] for event in events if event["what"] == "placed"]

    with (
        command(tmp_path / "ray.log", *head, RAY_worker_niceness="0"),
        command(said, *launch, RAY_ADDRESS=f"127.0.0.1:{port}", **variables) as driver,
    ):

        def until(holds: Callable[[], object], what: str) -> None:
            deadline = time.monotonic() + 1500
            while not holds():
                assert driver.poll() is None, said.read_text()
                assert time.monotonic() < deadline, f"no {what}: {said.read_text()}"
                time.sleep(0.2)

        until(lambda: updates() >= 2, "second update")
        url = re.findall(r"http://[\d.]+:\d+", (run / "logs/server-1.log").read_text())[-1]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/update_weights", b"{}", timeout=60)
        (server,) = (pid for pid in processes() if {"server-1", str(run)} <= set(words_of(pid)))
        os.kill(server, signal.SIGKILL)
        until(lambda: placed().count("server-1") == 2, "server that was started again")
        done = updates()
        until(lambda: updates() >= done + 2, "update with it")
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(600) == 0, said.read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/version"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["train/mismatch_max"] <= 1e-3 for line in lines)
    assert "stopped; resume it with" in said.read_text()
    deadline = time.monotonic() + 60
    while left := [words_of(pid) for pid in processes() if works_in(pid, tmp_path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def words_of(pid: int) -> list[str]:
    """A process's command line; nothing for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == folder
    except OSError:
        return False
