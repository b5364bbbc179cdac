"""What a run keeps of its trained tokens, when it is killed and resumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ludic.rollouts import read_rollouts
from ludic.rollouts.token_log import TokenLog, UpdateTokens, read_token_log
from ludic.runs.run import Run
from tests.rollouts.test_token_log import item, update

SMALL = [
    *("model.kwargs.hidden_size=32", "model.kwargs.layers=1", "eval.episodes=1"),
    *("sft.steps=0", "training.rollouts_per_update=8", "training.checkpoint_every=1"),
    'logging.loggers=["console"]',
]


@pytest.mark.integration
def test_a_resumed_run_has_the_tokens_of_every_update_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Run.from_file("tic-tac-toe", [*SMALL, "training.steps=1"], out=folder).go()
    path = folder / "rollouts" / "train.tokens.jsonl.zst"
    assert (folder / "rollouts" / "tokenizer.json").is_file()
    with TokenLog(path, append=True) as log:  # an update after the last checkpoint, then a kill
        lost: UpdateTokens = update(2, [item("step-1/0/0/agent")])
        log.write(lost)
    path.write_bytes(path.read_bytes() + path.read_bytes()[:31])
    Run.from_folder(folder, ["training.steps=2"]).go()
    found = list(read_token_log(path))
    assert {trained.update for trained in found} == {1, 2}
    turns = Counter((t.update, t.rollout_id, turn) for t in found for turn, *_ in t.turns)
    assert max(turns.values()) == 1
    rollouts = {r.id: r for r in read_rollouts(folder / "rollouts" / "train.jsonl.zst")}
    for trained in found:
        calls = rollouts[trained.rollout_id].agent_steps
        places = [
            trained.at(
                c.turn_index, len(c.trace.prompt_token_ids), len(c.trace.completion_token_ids)
            )
            for c in calls
            if c.trace
        ]
        covered = sum(place.stop - place.start for place in places if place is not None)
        assert covered == len(trained.logprobs)


@pytest.mark.integration
def test_tokens_are_left_out_if_a_run_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    less = [*SMALL, "training.steps=1", "logging.keep_tokens=false"]
    Run.from_file("tic-tac-toe", less, out=folder).go()
    assert [path.name for path in (folder / "rollouts").iterdir()] == ["train.jsonl.zst"]
