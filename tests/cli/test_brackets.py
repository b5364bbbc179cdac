"""Brackets are brackets: what environments and models say is shown as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ludic.eval import EvalReport
from ludic.eval.report import EpisodeResult
from ludic.runs.results.terminal import console, say, stages_table
from tests.cli.conftest import Ludic

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SAID = "[/b] [red]A[/red] or \\[B] :smile:"


def bracketed(folder: Path) -> None:
    """Makes the environment in `folder` speak in brackets, also of how an episode ended."""
    module = folder / "letters.py"
    text = module.read_text().replace('"Right."', repr(SAID)).replace('"Wrong."', repr(SAID))
    text = text.replace('"right" if', '"[/right]" if').replace('else "wrong"', 'else "[/wrong]"')
    module.write_text(text.replace('"A or B?"', repr(f"A or B? {SAID}")))


def test_brackets_of_an_environment_are_shown_by_every_command(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    bracketed(tmp_path)
    small = ["eval.outcomes=[]", "training.steps=1", "inference.max_context_tokens=200"]
    small += ["model.kwargs.max_position_embeddings=200", "training.max_seq_len=200"]
    done = ludic("train", letters, *small, "--out", "run")
    assert done.code == 0, done.err
    assert f"\n    A or B? {SAID}\n" in done.out
    assert f"\n    {SAID}\n" in done.out
    assert "[/right]" in done.out

    done = ludic("play", "run", "--model", "run")
    assert done.code == 0, done.err
    assert f"\n    A or B? {SAID}\n" in done.out

    done = ludic("eval", "run", "eval.episodes=2")
    assert done.code == 0, done.err
    assert "[/" in done.out

    (tmp_path / "letters.py").write_text(
        (tmp_path / "letters.py").read_text().replace("[red]", "[/green]")
    )
    del sys.modules["letters"]
    done = ludic("replay", "run/rollouts/train.jsonl.zst", "--limit", 1)
    assert done.code == 1, done.err
    assert "[red]" in done.out
    assert "[/green]" in done.out


def test_what_is_said_is_printed_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    say(SAID)
    assert capsys.readouterr().out == f"{SAID}\n"


def test_the_name_of_an_outcome_may_hold_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    episode = EpisodeResult(0, None, 1.0, success=True, outcome="[/win]")
    console.print(stages_table({"before": EvalReport("x", (episode,))}))
    assert "[/win]" in capsys.readouterr().out
