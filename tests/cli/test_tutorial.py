"""The tutorial's commands work as they stand, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.runs import scaffold
from tests.cli.conftest import ROOT, environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")

# The same commands, with so few steps that a test can wait for them.
WRAPPER = """\
#!/bin/bash
if [ "$1" = train ]; then
  set -- "$@" sft.examples=64 sft.steps=30 training.steps=2 training.rollouts_per_update=16 \\
    eval.episodes=16
fi
exec "{python}" -m ludic "$@"
"""


def test_every_command_of_the_tutorial_works(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    # A link to the interpreter would be one outside of the virtual environment.
    scripts = {"ludic": WRAPPER, "python": '#!/bin/bash\nexec "{python}" "$@"\n'}
    for name, script in scripts.items():
        (tools / name).write_text(script.format(python=sys.executable))
        (tools / name).chmod(0o755)
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.M | re.S)
    assert sum("ludic" in block for block in blocks) >= 4
    variables = environment()
    variables["PATH"] = f"{tools}:{Path(sys.executable).parent}:{variables['PATH']}"
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "3 passed" in done.stdout
    assert (tmp_path / "digits" / "first" / "summary.json").is_file()
    assert "paired permutation test" in done.stdout
    assert "episodes are the same again" in done.stdout


def test_the_class_in_the_tutorial_is_the_one_that_init_writes(tmp_path: Path) -> None:
    scaffold.write("digits", tmp_path)
    written = (tmp_path / "digits" / "digits.py").read_text()
    shown = PAGE.partition("class Digits")[2].partition("```")[0]
    assert "class Digits" + shown.rstrip() in written
