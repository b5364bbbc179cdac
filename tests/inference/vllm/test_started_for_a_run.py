"""`ludic train` with a real vLLM server that it starts for itself, and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.inference.vllm.conftest import ENV, ROOT, VLLM_PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

RUN = """\
[model]
kwargs = { hidden_size = 64, heads = 2, kv_heads = 1 }

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
steps = 2
rollouts_per_update = 4
max_steps = 1
max_seq_len = 512
learning_rate = 1e-3

[eval]
episodes = 2
"""


@contextmanager
def training(where: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """`ludic train` in a folder, which this ends if the test does not."""
    (where / "run.toml").write_text(RUN)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "ludic", "train", "run.toml", "--out", "run", *more]
    with subprocess.Popen(
        command,
        cwd=where,
        env={**os.environ, **ENV, "PYTHONPATH": path, "LUDIC_VLLM_PYTHON": VLLM_PYTHON},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def serving(where: Path) -> list[int]:
    """The processes that serve the model of the run in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # ended this moment
            continue
        if str(where / "run" / "vllm").encode() in words or b"run/vllm" in words:
            found.append(int(path.parent.name))
    return [pid for pid in found if Path(f"/proc/{pid}/cwd").resolve() == where]


def test_a_run_trains_with_a_server_of_its_own_and_leaves_none(tmp_path: Path) -> None:
    with training(tmp_path) as process:
        said, _ = process.communicate(timeout=1700)
    assert process.returncode == 0, said
    assert "starting a vLLM server for this run; that takes a minute" in said
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [line["train/version"] for line in lines] == [1, 2]
    assert all(line["train/mismatch_max"] <= 1e-3 for line in lines)
    log = (tmp_path / "run/vllm/server.log").read_text()
    assert "'max_model_len': 512" in log
    assert "'max_num_seqs': 8" in log
    assert serving(tmp_path) == []


def test_ctrl_c_ends_the_run_with_a_checkpoint_and_its_server(tmp_path: Path) -> None:
    with training(tmp_path, "training.steps=1000") as process:
        deadline = time.monotonic() + 1500
        metrics = tmp_path / "run/metrics.jsonl"
        while not (metrics.is_file() and metrics.read_text().strip()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert serving(tmp_path)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=600)
    assert list((tmp_path / "run/checkpoints/rl").glob("step-*")), said
    deadline = time.monotonic() + 60
    while serving(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert serving(tmp_path) == []


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    with training(tmp_path, "inference.max_context_tokens=100000") as process:
        said, _ = process.communicate(timeout=1700)
    assert process.returncode != 0
    assert re.search(r"vLLM \S+ ended with status \d+ before it was healthy", said), said
    assert "max_model_len" in said
    assert (tmp_path / "run-server.log").is_file()
    assert not (tmp_path / "run").exists()
