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

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

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


def updates(metrics: Path) -> list[dict[str, float]]:
    """What was written of each update that is done; a line may be half there."""
    text = metrics.read_text() if metrics.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def test_a_run_trains_with_a_server_of_its_own_which_ctrl_c_ends_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(tmp_path, "training.steps=100000") as process:
        deadline = time.monotonic() + 1600
        while len(updates(run / "metrics.jsonl")) < 2:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert serving(tmp_path)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=600)
    assert "starting a vLLM server for this run; that takes a minute" in said
    lines = updates(run / "metrics.jsonl")
    assert [line["train/version"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["train/mismatch_max"] <= 1e-3 for line in lines)
    log = (run / "vllm/server.log").read_text()
    assert "'max_model_len': 512" in log
    assert "'max_num_seqs': 8" in log
    assert list((run / "checkpoints/rl").glob("step-*")), said
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
