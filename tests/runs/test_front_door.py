"""`ludic.train` and its siblings: a run from a script is the run of the file, to the bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ludic
from ludic.eval import EvalReport
from tests.forked import Forked

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SCRIPT = '''\
import ludic


class Guess(ludic.SingleAgentEnv):
    """Four letters, one of which is right."""

    blocking = False

    def env_reset(self, *, seed=None):
        return self.env_current_obs(), {}

    def env_step(self, action):
        right = action.strip() == "C"
        return ludic.StepOutcome("Right." if right else "Wrong.", float(right), terminated=True)

    def env_current_obs(self):
        return "A, B, C or D?"


def teacher(obs, rng):
    return f"<move>{rng.choice('ABCD')}</move>"


WORDS = ["A, B, C or D?", "<move>", "</move>", "user\\n", "assistant\\n"]
SIZE = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "max_position_embeddings": 64}

if __name__ == "__main__":
    run = ludic.train(
        Guess,
        model={"name": "tiny", "kwargs": {**SIZE, "words": WORDS}},
        algorithm=ludic.grpo(group_size=8),
        parser=ludic.xml_parser("move"),
        steps=12,
        learning_rate=0.01,
        out="scripted",
        run={"threads": 1},
        sft={"teacher": teacher, "examples": 64, "steps": 30, "batch_size": 32,
             "learning_rate": 0.02},
        training={"rollouts_per_update": 32, "max_steps": 1, "max_seq_len": 64},
        inference={"max_context_tokens": 48, "sampling": {"max_tokens": 6}},
        eval={"episodes": 100, "success_above": 0.5},
    )
    print(run.report)
'''

RUN = """\
[run]
threads = 1
[model.kwargs]
hidden_size = 32
layers = 1
heads = 2
kv_heads = 1
max_position_embeddings = 64
words = ["A, B, C or D?", "<move>", "</move>", "user\\n", "assistant\\n"]
[env]
kind = "guess:Guess"
[protocol]
kwargs = { parser = { kind = "xml", tag = "move" } }
[sft]
teacher = "guess:teacher"
examples = 64
steps = 30
batch_size = 32
learning_rate = 0.02
[algorithm]
name = "grpo"
kwargs = { group_size = 8 }
[training]
steps = 12
learning_rate = 0.01
rollouts_per_update = 32
max_steps = 1
max_seq_len = 64
[inference]
max_context_tokens = 48
sampling = { max_tokens = 6 }
[eval]
episodes = 100
success_above = 0.5
"""


@dataclass(frozen=True)
class Scripted:
    """A finished run of the script, where it lies, and what it printed."""

    where: Path
    printed: str

    def report(self, stage: str, run: str = "scripted") -> EvalReport:
        text = (self.where / run / "eval" / f"{stage}.json").read_text()
        return EvalReport.from_dict(json.loads(text))


def ended(where: Path, script: Path | str, *arguments: str) -> tuple[int | None, str]:
    """How a program in a process of its own ended, and what it printed."""
    process = Forked(script, *arguments, where=where)
    text, _ = process.communicate(timeout=500)
    return process.returncode, text


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    where = tmp_path_factory.mktemp("scripted")
    (where / "guess.py").write_text(SCRIPT)
    (where / "guess.toml").write_text(RUN)
    code, text = ended(where, where / "guess.py")
    assert code == 0, text
    return Scripted(where, text)


@pytest.fixture
def here(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The script's folder as the working directory, from which its module can be imported."""
    monkeypatch.chdir(scripted.where)
    monkeypatch.syspath_prepend(scripted.where)
    before = list(sys.path)
    yield scripted.where
    sys.path[:] = before
    sys.modules.pop("guess", None)


def test_a_script_with_its_own_environment_learns_and_its_report_says_so(
    scripted: Scripted,
) -> None:
    before, taught, after = (
        scripted.report(stage).success for stage in ("before", "after_sft", "after_rl")
    )
    assert after.low > before.high
    assert after.low > taught.high  # and not by the cold start alone
    table = scripted.printed.rstrip().splitlines()[-7:]
    assert table[0].split() == ["success", "parse", "failure", "mean", "reward"]
    assert [line.split("  ")[0] for line in table[1::2]] == ["before", "after sft", "after rl"]
    assert f"{after.value:.1%}" in table[5]
    assert f"{100 * after.low:.0f} to {100 * after.high:.0f}" in table[6]


def test_the_same_run_from_a_run_file_gives_the_same_bits(scripted: Scripted) -> None:
    code, text = ended(scripted.where, "ludic", "train", "guess.toml", "--out", "filed")
    assert code == 0, text
    weights = [
        f"checkpoints/{s}/model/model.safetensors"
        for s in ("sft/step-00000030", "rl/step-00000012")
    ]
    for file in weights:
        scripts, files = (scripted.where / run / file for run in ("scripted", "filed"))
        assert scripts.read_bytes() == files.read_bytes()
    for stage in ("before", "after_sft", "after_rl"):
        assert scripted.report(stage) == scripted.report(stage, "filed")


def test_a_commands_needs_what_only_the_script_had_and_says_so_in_a_sentence(
    scripted: Scripted,
) -> None:
    stored = json.loads((scripted.where / "scripted/run.json").read_text())
    assert stored["env"][0]["kind"] == "object:guess:Guess"
    assert stored["sft"]["teacher"] == "object:guess:teacher"
    assert stored["protocol"]["kwargs"]["parser"] == {"kind": "xml", "tag": "move"}
    assert stored["algorithm"]["kwargs"] == {"group_size": 8}
    for command in (["train", "--resume", "scripted"], ["eval", "scripted"]):
        code, text = ended(scripted.where, "ludic", *command)
        assert code == 2
        assert text.startswith("ludic: scripted was started from a script")
        assert text.count("\n") == 1
        assert "ludic.resume('scripted', env=…, sft=…)" in text


def test_a_run_goes_on_with_the_objects_given_again(here: Path) -> None:
    from guess import Guess, teacher  # type: ignore[import-not-found]

    with pytest.raises(ludic.errors.ConfigError, match=r"sft\.teacher"):
        ludic.resume("scripted", env=Guess, steps=13)
    run = ludic.resume("scripted", env=Guess, sft={"teacher": teacher}, steps=13)
    assert (here / "scripted/checkpoints/rl/latest").read_text() == "step-00000013"
    assert list(run.report.stages) == ["before", "after_sft", "after_rl"]
    assert run.report.after.success.value > 0.5


def test_a_trained_run_is_evaluated_watched_and_trained_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from guess import Guess, teacher

    parts = {"env": Guess, "sft": {"teacher": teacher}}
    report = ludic.evaluate("scripted", episodes=20, **parts)
    assert len(report.episodes) == 20
    assert report.success.value > 0.5
    settings = {"parser": ludic.xml_parser("move"), "inference": {"sampling": {"max_tokens": 6}}}
    started = ludic.evaluate(Guess, model="scripted:sft", episodes=20, **settings)
    assert started.reward.value < report.reward.value
    (rollout,) = ludic.play(Guess, model="scripted", sft={"teacher": teacher})
    assert rollout.steps
    assert "<move>" in capsys.readouterr().out
