"""`ludic eval`: which of its overrides an evaluation goes by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludic.runs import playing

RUN = """
[env]
kind = "tic_tac_toe"
[eval]
temperature = 0.0
[eval.env]
kind = "tic_tac_toe"
[eval.protocol]
kind = "single_agent"
"""


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("env.kwargs.opponent=perfect", "eval.env.kwargs.opponent"),
        ("protocol.kwargs.parser=text", "eval.protocol.kwargs.parser"),
        ("inference.sampling.temperature=0.7", "eval.temperature"),
    ],
)
async def test_an_override_that_the_evaluation_has_its_own_setting_for_is_said(
    override: str,
    instead: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def evaluated(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(playing, "evaluate_model", evaluated)
    whole, plain = tmp_path / "whole.toml", tmp_path / "plain.toml"
    whole.write_text(RUN)
    plain.write_text(RUN.partition("[eval]")[0])

    await playing.evaluate_run(str(whole), [override])
    said = " ".join(capsys.readouterr().out.split())
    assert f"{override.partition('=')[0]} has no effect here" in said
    assert said.endswith(f"so set {instead}")
    value = override.partition("=")[2]
    for run, overrides in ((plain, [override]), (whole, [override, f"{instead}={value}"])):
        await playing.evaluate_run(str(run), overrides)
        assert not capsys.readouterr().out
