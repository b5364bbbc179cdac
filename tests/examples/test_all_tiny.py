"""Every example's tiny setting trains for a few updates, all of them in this process.

A new example is a new row of `EXAMPLES`: a run file, or a script with its arguments. The scripts
for Tic-Tac-Toe follow each other in `test_tic_tac_toe.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import pytest

from ludic.runs.run import Run
from tests.examples.conftest import EXAMPLES_FOLDER, run_script

pytestmark = [
    pytest.mark.examples,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("process_as_it_was"),
]

FEW = ["training.steps=2", "training.rollouts_per_update=16", "sft.examples=40", "sft.steps=20"]
FEW += ["sft.batch_size=16", "eval.episodes=8", "logging.loggers=[]"]


@dataclass(frozen=True)
class Example:
    """`path` in `examples/`, and what follows it on the command line. A run file is cut down to
    `FEW` first; a script writes its run below the working directory. `sandbox` says that it cannot
    do without bubblewrap."""

    path: str
    arguments: tuple[str, ...] = ()
    sandbox: bool = False


EXAMPLES = [
    Example("gsm8k/tiny.toml"),
    Example("gsm8k/train_gsm8k.py", ("--tiny", "--out", "run", *FEW)),
    Example("tool_use/tiny.toml", sandbox=True),
    Example("delegation/tiny.toml"),
    Example("self_play/tiny.toml", ("training.checkpoint_every=1",)),
    Example("code_exec/tiny.toml", sandbox=True),
    Example("compaction/tiny.toml"),
    Example("fsdp2_training/make_tiny.py", ("--output", "run", "--steps", "3")),
]


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(e, id=e.path, marks=[pytest.mark.sandbox] if e.sandbox else [])
        for e in EXAMPLES
    ],
)
def test_it_trains(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if example.path.endswith(".toml"):
        settings = [*FEW, *example.arguments]
        Run.from_file(EXAMPLES_FOLDER / example.path, settings, out=tmp_path / "run").go()
    else:
        run_script(example.path, *example.arguments, monkeypatch=monkeypatch)
    logs = list(tmp_path.rglob("metrics.jsonl"))
    updates = [json.loads(line) for log in logs for line in log.open(encoding="utf-8")]
    assert len(updates) >= 2
    assert all(isfinite(update["train/loss"]) for update in updates)
    assert any(update["train/grad_norm"] > 0 for update in updates)
    assert any(tmp_path.rglob("*.safetensors"))


def test_every_example_has_a_readme_and_a_line_in_the_table() -> None:
    table = (EXAMPLES_FOLDER / "README.md").read_text(encoding="utf-8")
    for folder in EXAMPLES_FOLDER.iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert (folder / "README.md").is_file(), folder
            assert f"({folder.name}/" in table, folder
    for example in EXAMPLES:
        assert (EXAMPLES_FOLDER / example.path).is_file()
