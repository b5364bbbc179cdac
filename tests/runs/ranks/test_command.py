"""`torchrun -m ludic train` with two gloo ranks, and a stand-in for vLLM that has the model."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.inference.vllm.server import free_port
from tests.cli.conftest import environment
from tests.examples.test_with_a_server import PlayingServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

TEACHER = '''\
import os
import re


def teacher(obs, rng):
    return f"<move>{rng.choice(re.findall('[ABC][123]', obs.rpartition('Free:')[2]))}</move>"


def breaks(sample):
    raise RuntimeError("this filter breaks")
'''

RUN = """\
[model]
name = "{model}"

[env]
kind = "tic_tac_toe"

[protocol]
kwargs = {{ parser = {{ kind = "xml", tag = "move" }} }}

[inference]
backend = "vllm"
servers = ["{url}"]

[inference.sampling]
max_tokens = 24

[sft]
teacher = "lessons:teacher"
examples = 8
steps = 2
batch_size = 8
learning_rate = 0.01

[reference]
model = "start"

[algorithm]
kwargs = {{ group_size = 4, kl_coeff = 0.01 }}

[training]
steps = 2
rollouts_per_update = 8
learning_rate = 0.01
max_seq_len = 1024
checkpoint_every = 1

[eval]
episodes = 4
every = 1
"""


@asynccontextmanager
async def served(where: Path) -> AsyncIterator[PlayingServer]:
    """A stand-in for vLLM, and beside it a run file that samples from it."""
    folder = where / "model"
    tiny_model(hidden_size=32, heads=2, kv_heads=1, layers=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (where / "lessons.py").write_text(TEACHER)
    async with PlayingServer(folder=folder).serving() as server:
        (where / "run.toml").write_text(RUN.format(model=folder, url=server.url))
        yield server


@asynccontextmanager
async def ranks(where: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`torchrun -m ludic` with two ranks, gone at the end whatever happens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *("-m", "ludic", *arguments),
        cwd=where,
        env=environment() | {"PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()  # and so its ranks
            await asyncio.wait_for(process.wait(), 60)


async def run(where: Path, *arguments: str) -> tuple[int | None, str, str]:
    async with ranks(where, *arguments) as process:
        out, err = await asyncio.wait_for(process.communicate(), 300)
    return process.returncode, out.decode(), err.decode()


async def test_two_ranks_train_what_one_does_and_only_one_talks(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        code, out, err = await run(tmp_path, "train", "run.toml", "--out", "two")
        assert code == 0, out + err
    assert "sharded over 2 ranks" in out
    assert out.count("run folder:") == out.count("Try next:") == 1
    assert "ludic" not in err
    assert server.version == "4"
    folder = tmp_path / "two"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    trained = [line for line in lines if "train/step" in line]
    assert [line["train/version"] for line in trained] == [3, 4]
    # The server scores with the weights it was sent, the ranks with their shards of them.
    assert all(line["train/mismatch_max"] < 1e-3 for line in trained)
    assert all(line["train/staleness_max"] == 0 for line in trained)
    assert trained[0]["train/kl_loss" if "train/kl_loss" in trained[0] else "train/kl"] == (
        pytest.approx(0.0, abs=1e-5)
    )  # the reference is the policy after the cold start
    assert {p.name for p in (folder / "eval").iterdir()} == {
        *("before.json", "after_sft.json", "after_rl.json", "step-1.json", "step-2.json")
    }
    manifest = json.loads((folder / "checkpoints/rl/step-00000002/manifest.json").read_text())
    assert manifest["world_size"] == 2
    saved = load_file(folder / "checkpoints/rl/step-00000002/model/model.safetensors")
    served_weights = dict(server.model.named_parameters())
    assert all(torch.equal(saved[name], served_weights[name]) for name in saved)


async def test_a_run_of_two_ranks_is_resumed_by_two(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        less = ["eval.every=0", "sft.steps=1"]
        code, out, err = await run(tmp_path, "train", "run.toml", *less, "--out", "two")
        assert code == 0, out + err
        code, out, err = await run(tmp_path, "train", "--resume", "two", "training.steps=3")
        assert code == 0, out + err
    assert server.version == "4"
    lines = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").open()]
    assert [line["train/step"] for line in lines if "train/step" in line] == [1, 2, 3]
