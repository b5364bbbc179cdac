"""A tiny model learns the game of `rom.py` through a dialogue that is compacted."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ludic.agents.base_agent import CUT_FEEDBACK
from ludic.context.compacting import AGAIN
from ludic.envs.gameboy import GameBoyEnv
from ludic.errors import EnvError
from ludic.rollouts import read_rollouts
from ludic.runs.run import Run
from ludic.runs.storage import rollout_file
from tests.envs.gameboy.rom import write_game

pytestmark = [
    pytest.mark.adapters("pyboy"), pytest.mark.integration, pytest.mark.timeout(600)
]  # fmt: skip

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "pokemon"
WORDS = [
    "system\n", "user\n", "assistant\n", "Play.", "Sum up.", CUT_FEEDBACK, AGAIN,
    " turns were dropped here]", "Something happened on the way.", "You cannot walk now.",
    "Hall, x ", "Garden, x ", ". Columns ", " to ", "On the screen:", "HELLO ANN", "Walker",
    "Name: ANN", "Party: Mouse, level ", ", HP 300", "Bag: empty", "Bag: Rope x", "Badges: none",
    "Money: ", "Press A to close the dialogue: 1", "##########", "#######", "###", ". y ",
    "walk to 6 4", "walk to 4 3", "right", "down", "start", "is known.", "No way to ", ", y ",
]  # fmt: skip
RUN_FILE = f"""
[run]
name = "walker"
threads = 1

[model.kwargs]
hidden_size = 48
layers = 2
heads = 4
kv_heads = 2
max_position_embeddings = 640
words = {json.dumps(WORDS)}

[inference]
slots = 8
max_context_tokens = 600
sampling = {{ max_tokens = 3 }}

[env]
kind = "gameboy"
kwargs = {{ rom = "walker.gb", game = "walker.toml", max_steps = 8, system_prompt = "Play." }}

[protocol.kwargs]
agent = "harness"
notes = false

[protocol.kwargs.context]
kind = "compacting"
window = 600
share = 0.7
summary_tokens = 3
keep_turns = 0
request = "Sum up."

[sft]
teacher = "{__name__}:shows"
examples = 60
steps = 60
batch_size = 8
learning_rate = 5e-3

[algorithm]
name = "grpo"
kwargs = {{ group_size = 4 }}

[training]
steps = 3
rollouts_per_update = 8
max_steps = 10
concurrency = 4
learning_rate = 1e-3
max_seq_len = 600

[eval]
episodes = 4

[logging]
loggers = []
"""


def shows(obs: str, rng: Random, history: Sequence[Any]) -> str:
    """A teacher that knows the way, and dawdles half of the time."""
    if obs == "Sum up.":
        return "down"
    if rng.random() < 0.5:
        return rng.choice(["right", "down", "start"])
    return "walk to 4 3" if "Garden, x " in obs else "walk to 6 4"


def test_the_tiny_model_is_trained_and_plays(tmp_path: Path) -> None:
    write_game(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE, encoding="utf-8")
    run = Run.from_file(tmp_path / "run.toml", [], out=tmp_path / "run").go()
    metrics = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    updates = [m for m in metrics if "train/loss" in m]
    assert len(updates) == 3
    assert any(m["train/grad_norm"] > 0 for m in updates)
    rollouts = list(read_rollouts(rollout_file(run.folder.rollouts, "train")))
    assert len(rollouts) == 3 * 8
    assert all(rollout.error is None for rollout in rollouts)
    assert any(turn.compacted for rollout in rollouts for turn in rollout.turns())
    for group in {rollout.group_id for rollout in rollouts}:
        members = [rollout for rollout in rollouts if rollout.group_id == group]
        openings = {member.env_steps[0].obs for member in members}
        assert len(members) == 4
        assert len(openings) == 1
    # It was shown the way, and so it finds the garden; a random model says no such words.
    after = run.report.stages["after_rl"].episodes
    assert len(after) == 4
    assert max(episode.reward for episode in after) >= 0.5


@pytest.mark.parametrize("file", ["eval.toml", "train.toml"])
def test_the_run_files_of_the_example_hold_together(file: str, tmp_path: Path) -> None:
    game = write_game(tmp_path)
    (tmp_path / "room.state").write_bytes(b"")
    given = [f"env.kwargs.{key}={json.dumps(value)}" for key, value in game.items()]
    given += [f'env.kwargs.states=["{tmp_path}/room.state"]', 'model.name="tiny"']
    run = Run.from_file(EXAMPLE / file, given, out=tmp_path / "run")
    (env,) = run.config.env
    assert (env.kind, env.kwargs["rom"]) == ("gameboy", game["rom"])
    with pytest.raises(EnvError, match="cannot be read: No such file"):
        Run.from_file(EXAMPLE / file, [*given, 'env.kwargs.rom="gone.gb"'], out=tmp_path / "other")


def test_a_state_is_saved_while_a_person_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    game = write_game(tmp_path)
    state = tmp_path / "garden.state"
    monkeypatch.setattr(sys, "argv", ["save", game["rom"], str(state), "--game", game["game"]])
    typed = iter(["walk to 6 4", ""])
    monkeypatch.setattr("builtins.input", lambda asked: next(typed))
    runpy.run_path(str(EXAMPLE / "save_state.py"))
    assert "█" in capsys.readouterr().out
    env = GameBoyEnv(**game, states=[str(state)])
    assert env.env_reset(seed=0)[0].startswith("Garden, x 1, y 1.")
    env.close()
