"""`torchrun -m ludic train` with two gloo ranks, and a stand-in for vLLM that has the model.

One run is torchrun's; the others have ranks that are forked, which is quicker."""

from __future__ import annotations

import asyncio
import json
import re
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
from tests.forked import end_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

LESSONS = """\
import os
import re
from dataclasses import dataclass, replace

from ludic.errors import ConfigError
from ludic.training import TokenClippedSurrogateLoss, make_grpo


def teacher(obs, rng):
    return f"<move>{rng.choice(re.findall('[ABC][123]', obs.rpartition('Free:')[2]))}</move>"


@dataclass(frozen=True, kw_only=True)
class FailsOnRank1(TokenClippedSurrogateLoss):
    def objective(self, ratio):
        if os.environ["RANK"] == "1":
            raise ConfigError("no memory left")
        return super().objective(ratio)


def fails_on_rank_1(group_size, kl_coeff):
    return replace(make_grpo(group_size), loss=FailsOnRank1())
"""

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
steps = 1000
rollouts_per_update = 8
learning_rate = 0.01
max_seq_len = 1024
checkpoint_every = 1

[eval]
episodes = 2
every = 1
"""


@asynccontextmanager
async def served(where: Path) -> AsyncIterator[PlayingServer]:
    """A stand-in for vLLM, and beside it a run file that samples from it."""
    folder = where / "model"
    tiny_model(hidden_size=32, heads=2, kv_heads=1, layers=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (where / "lessons.py").write_text(LESSONS)
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


async def run(where: Path, *arguments: str) -> tuple[list[int | None], str]:
    """How two ranks of `ludic` ended that are forked, and what they printed."""
    codes, texts = await asyncio.to_thread(
        end_ranks, "ludic", *arguments, where=where, timeout_s=900
    )
    return codes, "".join(texts)


async def test_two_ranks_train_stop_and_go_on_and_only_one_talks(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        latest = tmp_path / "two/checkpoints/rl/latest"
        async with ranks(tmp_path, "train", "run.toml", "--out", "two") as process:
            while not latest.exists() and process.returncode is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            process.send_signal(signal.SIGINT)
            out, err = (
                text.decode() for text in await asyncio.wait_for(process.communicate(), 600)
            )
        assert out.count("stopped; resume it with: torchrun") == 1, out + err
        assert out.count("run folder:") == out.count("sharded over 2 ranks") == 1
        assert not reports(err)
        done = int(latest.read_text().removeprefix("step-"))
        assert 0 < done < 1000
        goal = f"training.steps={done + 1}"
        codes, out = await run(tmp_path, "train", "--resume", "two", goal)
        assert codes == [0, 0], out
        assert out.count("Try next:") == 1
        check_trained(tmp_path / "two", server, steps=done + 1)


def check_trained(folder: Path, server: PlayingServer, steps: int) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    trained = [line for line in lines if "train/step" in line]
    assert [line["train/step"] for line in trained] == list(range(1, steps + 1))
    # The cold start had two updates of its own.
    assert [line["train/version"] for line in trained] == list(range(3, steps + 3))
    assert server.version == str(steps + 2)
    # The server scores with the weights it was sent, the ranks with their shards of them.
    assert all(line["train/mismatch_max"] < 1e-3 for line in trained)
    assert all(line["train/staleness_max"] == 0 for line in trained)
    # The reference is the policy after the cold start, which is where the first update begins.
    first, second = (line["train/kl_reference_k3"] for line in trained[:2])
    assert first == pytest.approx(0.0, abs=1e-5)
    assert second > 1e-4
    kept = {path.name for path in (folder / "eval").iterdir()}
    assert kept >= {"before.json", "after_sft.json", "after_rl.json", "step-1.json"}
    checkpoint = folder / f"checkpoints/rl/step-{steps:08d}"
    assert json.loads((checkpoint / "manifest.json").read_text())["world_size"] == 2
    saved, held = load_file(checkpoint / "model/model.safetensors"), server.model.state_dict()
    assert all(torch.equal(saved[name], held[name]) for name in saved)


def reports(err: str) -> list[str]:
    """What Ludic itself said; `torchrun` says much more."""
    return re.findall(r"^ludic(?: \(rank \d\))?: .*", err, re.MULTILINE)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        # On rank 0, while the others wait for word.
        (["inference.servers=['http://127.0.0.1:9']"], "127.0.0.1:9"),
        # On rank 1 alone, in the middle of an update.
        (["sft.steps=0", "algorithm.name='lessons:fails_on_rank_1'"], "(rank 1): no memory left"),
    ],
)
async def test_a_failure_ends_all_ranks_with_one_report(
    tmp_path: Path, settings: list[str], said: str
) -> None:
    async with served(tmp_path):
        small = ["eval.episodes=1", "eval.every=0", *settings]
        codes, out = await run(tmp_path, "train", "run.toml", *small, "--out", "two")
    assert any(codes), out
    (report,) = reports(out)
    assert said in report, out
    assert (tmp_path / "two").exists() == ("rank 1" in said)
