"""The tutorial's commands work as they stand, one after the other."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.runs import scaffold
from tests.cli.conftest import ROOT, environment
from tests.forked import Forked

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")

# With so few steps that a test can wait for them.
FEW = (
    *("sft.examples=64", "sft.steps=30", "training.steps=2", "training.rollouts_per_update=16"),
    "eval.episodes=16",
)


def run_line(line: str, where: Path, variables: dict[str, str]) -> tuple[int | None, str]:
    """How a line of the page ended, and what it printed: `ludic` in a process that has its imports
    already, everything else in a shell."""
    words = shlex.split(line)
    if words[0] == "ludic" and not set(words) & {"|", ">", "&&", ";"}:
        more = FEW if words[1] == "train" else ()
        process = Forked(*words, *more, where=where, environment=variables)
        text, _ = process.communicate(timeout=600)
        return process.returncode, text
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=where,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout


def test_every_command_of_the_tutorial_works(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    # A link to the interpreter would be one outside of the virtual environment.
    for name, call in {"ludic": "-m ludic ", "python": ""}.items():
        (tools / name).write_text(f'#!/bin/bash\nexec "{sys.executable}" {call}"$@"\n')
        (tools / name).chmod(0o755)
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.M | re.S)
    assert sum("ludic" in block for block in blocks) >= 4
    variables = environment()
    variables["PATH"] = f"{tools}:{Path(sys.executable).parent}:{variables['PATH']}"
    where, printed = tmp_path, ""
    for line in "".join(blocks).splitlines():
        if line.startswith("cd "):
            where = (where / line.removeprefix("cd ")).resolve(strict=True)
            continue
        code, text = run_line(line, where, variables)
        assert code == 0, f"{line}\n{text[-6000:]}"
        printed += text
    assert "3 passed" in printed
    assert (tmp_path / "digits" / "first" / "summary.json").is_file()
    assert "paired permutation test" in printed
    assert "episodes match" in printed


def test_the_class_in_the_tutorial_is_the_one_that_init_writes(tmp_path: Path) -> None:
    scaffold.write("digits", tmp_path)
    written = (tmp_path / "digits" / "digits.py").read_text()
    shown = PAGE.partition("class Digits")[2].partition("```")[0]
    assert "class Digits" + shown.rstrip() in written
