"""Checks the wheel: built from a clean export of the last commit, installed into an environment
outside the checkout, and used there as someone would who has only the wheel.

The environment borrows the dependencies of the one that runs this, without what that one has of
Ludic. Run `python -m tools.wheel_check`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 150
GUESS = '''\
import ludic


class Guess(ludic.SingleAgentEnv):
    """Four letters, one of which is right."""

    def env_reset(self, *, seed=None):
        return self.env_current_obs(), {}

    def env_step(self, action):
        right = action.strip() == "C"
        return ludic.StepOutcome("Right." if right else "Wrong.", float(right), terminated=True)

    def env_current_obs(self):
        return "A, B, C or D?"
'''
SMALLER = {
    '"Qwen/Qwen2.5-0.5B-Instruct"': '"tiny"',
    "steps=200,": """steps=1,
    training={"rollouts_per_update": 8, "max_steps": 1, "max_seq_len": 256},
    inference={"max_context_tokens": 256, "sampling": {"max_tokens": 8}},
    eval={"episodes": 4},
    out="first",""",
}
"""What the README's script is changed in, so that it downloads nothing and ends soon."""


def main() -> None:
    """Builds, installs and uses the wheel; the first step that fails ends it."""
    with tempfile.TemporaryDirectory(prefix="ludic-wheel-") as temporary:
        where = Path(temporary).resolve()
        python = install(build(export(where / "export"), where), where / "venv")
        work = where / "work"
        work.mkdir()
        found = run(python, "-c", "import ludic; print(ludic.__file__)", cwd=work)
        if not Path(found.strip()).is_relative_to(where / "venv"):
            sys.exit(f"wheel-check: ludic is not the wheel's: {found.strip()}")
        ludic = python.with_name("ludic")
        if '"tic_tac_toe"' not in run(ludic, "train", "tic-tac-toe", "--dry-run", cwd=work):
            sys.exit("wheel-check: the built-in run has no environment tic_tac_toe")
        if "tic_tac_toe" not in run(ludic, "envs", cwd=work):
            sys.exit("wheel-check: `ludic envs` does not list tic_tac_toe")
        if "grpo" not in run(python, "-m", "ludic", "algorithms", cwd=work):
            sys.exit("wheel-check: `python -m ludic algorithms` does not list grpo")
        page = "(files('ludic.view') / 'static' / 'pages' / 'rollout.js').read_text()"
        run(python, "-c", f"from importlib.resources import files; {page}", cwd=work)
        run(python, "-c", "import ludic.view.export, ludic.view.index", cwd=work)
        job = "(files('ludic.launch') / 'slurm.sh.jinja').read_text()"
        run(python, "-c", f"from importlib.resources import files; {job}", cwd=work)
        for kind in ("single", "steps", "two-seats"):
            run(ludic, "init", kind.replace("-", "_"), "--kind", kind, cwd=work)
        run(ludic, "train", "run.toml", "--dry-run", cwd=work / "two_seats")
        (work / "guess.py").write_text(GUESS, encoding="utf-8")
        (work / "readme.py").write_text(script(where / "export" / "README.md"), encoding="utf-8")
        if "before" not in run(python, "readme.py", cwd=work):
            sys.exit("wheel-check: the README's script printed no report")


def export(to: Path) -> Path:
    """Writes the last commit's files, and nothing else, into a new folder."""
    to.mkdir()
    archive = to.with_suffix(".tar")
    run("git", "archive", "--output", archive, "HEAD", cwd=ROOT)
    run("tar", "-xf", archive, "-C", to, cwd=to)
    return to


def build(source: Path, to: Path) -> Path:
    """Builds the wheel with the setuptools that is installed here."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", to, source, cwd=to)
    return next(to.glob("*.whl"))


def install(wheel: Path, to: Path) -> Path:
    """Installs the wheel into a new environment; returns its Python."""
    venv.create(to, with_pip=False, symlinks=True)
    python = to / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "-q", "--no-deps", wheel, cwd=to)
    # A folder named in a .pth file is searched, but its own .pth files, among them the one that
    # leads to this checkout, are not read.
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=to)
    shared = sysconfig.get_path("purelib")
    (Path(packages.strip()) / "dependencies.pth").write_text(shared + "\n", encoding="utf-8")
    return python


def script(readme: Path) -> str:
    """Returns the README's script of a whole run, made smaller."""
    blocks = readme.read_text(encoding="utf-8").split("```python")[1:]
    code = next(block for block in blocks if "ludic.train(" in block)
    code = code.split("\n", 1)[1].split("```")[0]
    for old, new in SMALLER.items():
        if old not in code:
            sys.exit(f"wheel-check: the README's script has no {old} any more: see SMALLER")
        code = code.replace(old, new)
    return code


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command without this checkout on its path; returns what it printed."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    shown = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    if done.returncode:
        sys.exit(f"wheel-check: {shown} failed\n{done.stdout}{done.stderr}")
    print(f"  {shown}: {time.monotonic() - began:.1f} s", flush=True)
    return done.stdout


if __name__ == "__main__":
    main()
