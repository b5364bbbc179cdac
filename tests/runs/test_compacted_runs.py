"""Runs whose dialogues are compacted: in other processes, resumed, replayed, over Redis."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.agents.base_agent import CUT_FEEDBACK
from ludic.context.compacting import AGAIN
from ludic.errors import ConfigError
from ludic.rollouts import read_rollouts, read_token_log
from ludic.runs.playing import replay_file
from ludic.runs.storage import rollout_file, token_file
from ludic.types import Rollout
from tests.forked import Forked

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = """
[run]
name = "long"
threads = 1

[env]
name = "ten"  # which the seeds depend on: with these, some summaries are none
kind = "tests.runs.worlds:Long"

[protocol.kwargs.context]
kind = "compacting"
window = 72
share = 0.7
summary_tokens = 2
keep_turns = 1
request = "Sum."

[model.kwargs]
hidden_size = 16
layers = 1
heads = 2
kv_heads = 1
max_position_embeddings = 128
words = WORDS

[algorithm]
name = "grpo"
kwargs = { group_size = 2 }

[inference]
slots = 4
max_context_tokens = 80
# A random model seldom ends its message: let most bytes end it.
sampling = { max_tokens = 2, stop_token_ids = STOPS }

[training]
steps = 3
rollouts_per_update = 4
max_steps = 12
max_seq_len = 80
checkpoint_every = 1

[eval]
episodes = 2

[logging]
loggers = []
"""
WORDS = ["Go.", "Sum.", "user\n", "assistant\n", CUT_FEEDBACK, AGAIN, " turns were dropped here]"]
RUN_FILE = RUN_FILE.replace("STOPS", str(list(range(33, 200)))).replace("WORDS", json.dumps(WORDS))


def played(folder: Path) -> dict[str, Rollout]:
    return {r.id: r for r in read_rollouts(rollout_file(folder / "rollouts", "train"))}


def timeless(rollouts: dict[str, Rollout]) -> dict[str, Any]:
    """All but how long a call waited."""
    return {k: ([s.trace for s in r.agent_steps], r.env_steps) for k, r in rollouts.items()}


def compactions(rollout: Rollout) -> list[dict[str, Any]]:
    return [dict(step.info) for step in rollout.env_steps if step.info.get("compacted")]


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "long.toml"
    path.write_text(RUN_FILE)
    return str(path)


def test_workers_and_a_killed_and_resumed_run_end_with_the_same_weights(
    run_file: str, tmp_path: Path
) -> None:
    whole, workers, broken = (tmp_path / name for name in ("whole", "workers", "broken"))
    ludic.Run.from_file(run_file, out=whole).go()
    rollouts = played(whole)
    assert all(len(compactions(r)) >= 2 for r in rollouts.values())
    kinds = ["dropped_turns" in info for r in rollouts.values() for info in compactions(r)]
    assert set(kinds) == {True, False}, "some summaries are none"
    assert all(r.error is None for r in rollouts.values())
    ludic.Run.from_file(run_file, ["training.workers=2"], out=workers).go()
    assert timeless(played(workers)) == timeless(rollouts)

    run = Forked("ludic", "train", run_file, "--out", broken, where=ROOT)
    metrics = broken / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while run.poll() is None and time.monotonic() < deadline:
        if metrics.is_file() and metrics.read_text().count("train/step") >= 1:
            break
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=60)
    ludic.Run.from_folder(broken).go()
    assert timeless(played(broken)) == timeless(rollouts)
    found = [sorted(folder.glob("**/model.safetensors"))[-1] for folder in (whole, workers, broken)]
    assert len({path.read_bytes() for path in found}) == 1
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert all(line["train/compactions_mean"] >= 2 for line in lines if "train/step" in line)


async def test_every_sampled_token_is_trained_on_once_and_a_replay_is_exact(
    run_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "run"
    await ludic.Run.from_file(run_file, ["training.steps=1"], out=out).go_async()
    rollouts = played(out)
    trained: dict[str, int] = {}
    for record in read_token_log(token_file(out / "rollouts")):
        trained[record.rollout_id] = trained.get(record.rollout_id, 0) + len(record.logprobs)
    assert trained == {k: r.num_tokens for k, r in rollouts.items()}
    lines: list[str] = []
    counts = await replay_file(
        rollout_file(out / "rollouts", "train"), limit=100, model=None, on_divergence=lines.append
    )
    assert (counts["same"], counts["diverged"], lines) == (len(rollouts), 0, [])


def test_summaries_without_credit_are_not_trained_on(run_file: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ["training.steps=1", 'algorithm.summaries="none"']
    ludic.Run.from_file(run_file, settings, out=out).go()
    rollouts = played(out)
    turns = {(t.rollout_id, turn) for t in read_token_log(token_file(out / "rollouts"))
             for turn, _, _ in t.turns}  # fmt: skip
    compacted = {
        (r.id, turn.index) for r in rollouts.values() for turn in r.turns() if turn.compacted
    }
    assert compacted
    assert not compacted & turns
    assert turns | compacted == {(r.id, t.index) for r in rollouts.values() for t in r.turns()}


@pytest.mark.redis
def test_over_redis(run_file: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("train", run_file, "--async", "--out", out, "pipeline.actors=1")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # for the actor
    process = Forked("ludic", *words, where=ROOT, environment={"PYTHONPATH": paths})
    try:
        output, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, output
    rollouts = played(out)
    assert len(rollouts) >= 12
    assert all(compactions(r) for r in rollouts.values() if r.error is None)
    trained: dict[str, int] = {}
    for record in read_token_log(token_file(out / "rollouts")):
        trained[record.rollout_id] = trained.get(record.rollout_id, 0) + len(record.logprobs)
    assert len(trained) == 12
    assert trained == {k: rollouts[k].num_tokens for k in trained}


def test_a_window_too_small_for_the_system_prompt_is_refused_when_the_run_is_checked(
    run_file: str,
) -> None:
    with pytest.raises(ConfigError, match="window of 72 tokens is too small"):
        ludic.Run.from_file(
            run_file, ['protocol.kwargs.system_prompt="Be good, and be very, very good."']
        )
    with pytest.raises(ConfigError, match="window of 20 tokens is too small"):
        ludic.Run.from_file(run_file, ["protocol.kwargs.context.window=20"])
    with pytest.raises(ConfigError, match=r"algorithm\.summaries='none' is for.*drop_compactions"):
        ludic.Run.from_file(
            run_file,
            ['algorithm.name="reinforce"', "algorithm.kwargs={}", 'algorithm.summaries="none"'],
        )
