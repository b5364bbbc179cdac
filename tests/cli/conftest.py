"""The command in this process, in an empty folder, and a run that learns a little in seconds."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ludic.cli import main
from tests.forked import Forked

ROOT = Path(__file__).resolve().parents[2]

LETTERS = '''\
"""One question with two answers, of which one is right."""

from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome


class Letters(SingleAgentEnv):
    """Say the right letter."""

    blocking = False

    def __init__(self, right="A"):
        self.right = right

    def env_reset(self, *, seed=None):
        return self.env_current_obs(), {}

    def env_step(self, action):
        right = action.strip() == self.right
        return StepOutcome(
            "Right." if right else "Wrong.",
            float(right),
            terminated=True,
            info={"result": "right" if right else "wrong"},
        )

    def env_current_obs(self):
        return "A or B?"


def teacher(obs, rng):
    return rng.choice("AB")
'''

RUN = """\
[run]
name = "letters"

[model]
kwargs = { hidden_size = 16, layers = 1, heads = 2, kv_heads = 1, max_position_embeddings = 64, \
words = ["A or B?", "system\\n", "user\\n", "assistant\\n"] }

[env]
kind = "letters:Letters"

[inference]
slots = 4
max_context_tokens = 48

[inference.sampling]
max_tokens = 4

[sft]
teacher = "letters:teacher"
examples = 8
steps = 12
batch_size = 8
learning_rate = 0.05

[algorithm]
kwargs = { group_size = 4 }

[training]
steps = 4
rollouts_per_update = 8
max_steps = 1
concurrency = 8
learning_rate = 0.01
max_seq_len = 64
checkpoint_every = 1

[eval]
episodes = 8
outcomes = ["right", "wrong"]
"""


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str


Ludic = Callable[..., Outcome]


@pytest.fixture
def ludic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ludic]:
    """Runs `ludic` with these arguments in `tmp_path`; modules it found there are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    before = list(sys.path)

    def run(*arguments: object, stdin: str = "") -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["ludic", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code: object = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as exc:
                code = exc.code
        return Outcome(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())

    yield run
    sys.path[:] = before
    here = str(tmp_path.parent)  # the finished run beside it has modules of the same names
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(here):
            del sys.modules[name]


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A run file and the module that it names."""
    (tmp_path / "letters.py").write_text(LETTERS)
    path = tmp_path / "letters.toml"
    path.write_text(RUN)
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of `letters`, made once; do not write to it."""
    where = tmp_path_factory.mktemp("trained")
    (where / "letters.py").write_text(LETTERS)
    (where / "letters.toml").write_text(RUN)
    process = Forked("ludic", "train", "letters.toml", "--out", "done", where=where)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    return where / "done"


def environment() -> dict[str, str]:
    """For commands in a process of their own: this source, one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def forked(where: Path, *arguments: str) -> Iterator[Forked]:
    """`ludic` in a process that has its imports already, gone at the end whatever happens."""
    process = Forked("ludic", *arguments, where=where)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdout.close()


@contextlib.contextmanager
def started(where: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`ludic` in a process of its own, gone at the end whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ludic", *arguments],
        cwd=where,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell's background job ignores Ctrl-C, and so would everything that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
