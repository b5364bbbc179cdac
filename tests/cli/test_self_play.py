"""Self-play from a run file: against itself, against its past, resumed, and measured outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ludic.rollouts import read_rollouts
from tests.cli.conftest import Ludic

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

TINY = [
    "model.kwargs.hidden_size=16",
    "model.kwargs.layers=1",
    "model.kwargs.heads=2",
    "model.kwargs.kv_heads=1",
    "inference.slots=8",
    "sft.examples=16",
    "sft.steps=20",
    "sft.batch_size=16",
    "sft.learning_rate=0.03",
    "training.steps=5",
    "training.rollouts_per_update=8",
    "algorithm.kwargs.group_size=2",
    "training.checkpoint_every=2",
    "training.schedule=constant",  # another needs the number of steps, which resuming changes
    "training.past_opponents=2",
    "eval.episodes=4",
]


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints/rl/step-00000005/model/model.safetensors").read_bytes()


def test_a_policy_trains_against_itself_and_its_past_and_resumes_to_the_same_weights(
    ludic: Ludic, tmp_path: Path
) -> None:
    done = ludic("train", "tic-tac-toe-self-play", *TINY, "--out", "whole")
    assert done.code == 0, done.err
    folder = tmp_path / "whole"
    rollouts = list(read_rollouts(folder / "rollouts" / "train.jsonl.zst"))
    met = [r.meta.get("opponent") for r in rollouts]
    assert {None, "step-0", "step-2"} <= set(met)
    by_episode: dict[str, list[str]] = {}
    for rollout in rollouts:
        by_episode.setdefault(rollout.episode_id, []).append(rollout.agent_id)
    alone = [e for e, seats in by_episode.items() if len(seats) == 1]
    assert len(alone) == sum(opponent is not None for opponent in met)
    assert sorted(p.name for p in (folder / "pool").iterdir()) == [
        "step-00000000",
        "step-00000002",
        "step-00000004",
    ]
    report = json.loads((folder / "eval" / "after_rl.json").read_text())
    assert len(report["episodes"]) == 4  # of the game against a fixed opponent: one seat each
    assert "win_after_rl" in json.loads((folder / "summary.json").read_text())

    halved = [*TINY, "training.steps=3"]
    halved.remove("training.steps=5")
    ludic("train", "tic-tac-toe-self-play", *halved, "--out", "part")
    done = ludic("train", "--resume", "part", "training.steps=5")
    assert done.code == 0, done.err
    assert weights(tmp_path / "part") == weights(folder)

    replayed = ludic("replay", folder / "rollouts" / "train.jsonl.zst")
    assert "had other models in them" in replayed.out
    assert replayed.code == 0, replayed.out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.checkpoint_every=0"], ["checkpoint_every"]),
        (["protocol.kind=single_agent"], ["multi_agent"]),
        (["env.kind=tic_tac_toe"], ["several agents"]),
    ],
)
def test_self_play_that_cannot_be_is_refused(
    ludic: Ludic, overrides: list[str], words: list[str]
) -> None:
    done = ludic("train", "tic-tac-toe-self-play", *TINY, *overrides, "--out", "run")
    assert done.code == 2
    for word in words:
        assert word in done.err


def test_when_past_opponents_are_taken_cannot_change_on_the_way(
    ludic: Ludic, tmp_path: Path
) -> None:
    from ludic.runs.settings import find_run
    from ludic.runs.storage import RunFolder

    config, _ = find_run("tic-tac-toe-self-play", TINY)
    RunFolder(tmp_path / "run").make(config, modules=tmp_path)
    done = ludic("train", "--resume", "run", "training.checkpoint_every=3")
    assert done.code == 2
    assert "training.checkpoint_every cannot change" in done.err
