"""A resumed run says if the code of its environments is not what it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from ludic.errors import ConfigError
from ludic.runs.run import Run
from ludic.runs.settings import RunConfig, parse_run
from ludic.runs.storage import RunFolder, env_sources, note_env_sources

BASE = """
from coins_words import OPENING
from ludic.envs import SingleAgentEnv
from ludic.types import StepOutcome

class Base(SingleAgentEnv):
    def env_reset(self, *, seed=None):
        return OPENING, {}

    def env_step(self, action):
        return StepOutcome("", reward=float(action == "heads"), terminated=True)

    def env_current_obs(self):
        return OPENING
"""
MODULES = {
    "coins_words.py": "OPENING = 'Heads or tails?'\n",
    "coins_base.py": BASE,
    "coins.py": "import json, numpy\nfrom coins_base import Base\nclass Coins(Base): ...\n",
    "coins_other.py": "",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in MODULES.items():
        (tmp_path / name).write_text(dedent(text), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def forget() -> None:
    for name in MODULES:
        sys.modules.pop(name.removesuffix(".py"), None)


def coins() -> RunConfig:
    forget()
    return parse_run('[env]\nkind = "coins:Coins"\n')


def test_classes_bases_and_what_they_import_beside_them_are_the_source(modules: Path) -> None:
    found = {name for name in env_sources(coins()) if not name.startswith("ludic.")}
    assert found == {"coins", "coins_base", "coins_words"}
    assert "ludic.envs.single_agent_env" in env_sources(coins())


def test_a_virtual_environment_beside_them_is_not(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = modules / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "coins_installed.py").write_text("THERE = 1\n")
    monkeypatch.syspath_prepend(str(installed))
    with (modules / "coins.py").open("a") as file:
        file.write("from coins_installed import THERE\n")
    assert "coins_installed" not in env_sources(coins())


def test_a_changed_file_is_named_once(modules: Path) -> None:
    folder = RunFolder(modules / "run")
    folder.path.mkdir()
    assert note_env_sources(coins(), folder) is None, "the first time there is nothing to compare"
    assert note_env_sources(coins(), folder) is None
    (modules / "coins_words.py").write_text("OPENING = 'Call it.'\n")
    said = note_env_sources(coins(), folder)
    assert said is not None
    assert f"in {modules / 'coins_words.py'}: earlier results" in said
    assert note_env_sources(coins(), folder) is None, "it is the run's code now"
    (modules / "coins.py").write_text(BASE.replace("Base", "Coins"))
    said = note_env_sources(coins(), folder)
    assert said is not None
    assert f"in {modules / 'coins.py'}, coins_base: earlier" in said


def test_a_resume_says_it_and_one_of_an_older_folder_says_nothing(
    modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["training.rollouts_per_update=8", "eval.episodes=2", "logging.loggers=[]"]
    small += ["training.max_steps=1", "inference.sampling.max_tokens=2"]
    (modules / "run.toml").write_text('[env]\nkind = "coins:Coins"\n')
    Run.from_file(modules / "run.toml", ["training.steps=1", *small], out="run").go()
    (modules / "run" / "env_sources.json").unlink()
    for steps, said in ((2, False), (3, True), (4, False)):
        if said:
            (modules / "coins_words.py").write_text("OPENING = 'Call it.'\n")
        forget()
        capsys.readouterr()
        Run.from_folder("run", [f"training.steps={steps}"]).go()
        assert ("code changed since this run was last started" in capsys.readouterr().out) is said


def test_a_damaged_record_is_one_sentence(modules: Path) -> None:
    folder = RunFolder(modules / "run")
    folder.path.mkdir()
    (folder.path / "env_sources.json").write_text("{")
    with pytest.raises(ConfigError, match=r"env_sources\.json"):
        note_env_sources(coins(), folder)
