"""An environment that raises: the command names its file and line, and --debug shows the rest."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from ludic.errors import RolloutError
from tests.cli.conftest import LETTERS, Ludic

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_the_command_names_the_users_line_and_debug_prints_the_traceback(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    source = LETTERS.replace("return self.env_current_obs(), {}", "return [][0], {}")
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "[][0]" in text)
    (tmp_path / "letters.py").write_text(source)
    done = ludic("eval", letters)
    assert done.code == 2
    assert f"letters.py, line {line}, in env_reset" in done.err
    assert "IndexError" in done.err
    assert "Traceback" not in done.err
    with pytest.raises(RolloutError) as raised:
        ludic("eval", letters, "--debug")
    printed = "".join(traceback.format_exception(raised.value))
    assert "return [][0], {}" in printed
