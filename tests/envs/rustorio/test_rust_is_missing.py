"""A compiler or a crate that is missing is told in one sentence, before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludic.envs.rustorio.crate import find_toolchain
from ludic.errors import ConfigError
from ludic.runs.run import Run

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "rustorio"


def compiler(folder: Path, version: str) -> None:
    """Programs that say a version, below the /usr of a machine that has none."""
    for name in ("rustc", "cargo"):
        (folder / name).write_text(f"#!/bin/sh\necho {name} {version}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("name", ["eval.toml", "train.toml"])
def test_a_missing_crate_is_told_when_the_run_is_checked(tmp_path: Path, name: str) -> None:
    where = f"env.kwargs.crate={tmp_path / 'none'}"
    with pytest.raises(ConfigError, match=r"^there is no Rust crate in .*none'") as told:
        Run.from_file(EXAMPLES / name, [where])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["eval.toml", "train.toml"])
def test_a_missing_compiler_is_told_when_the_run_is_checked(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Cargo.toml").write_text("[package]\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs rustc and cargo .*apt-get install") as told:
        Run.from_file(EXAMPLES / name, [f"env.kwargs.crate={tmp_path}"])
    assert "\n" not in str(told.value)


def test_a_compiler_that_is_too_old_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("ludic.envs.rustorio.crate.VISIBLE", str(tmp_path))
    compiler(tmp_path, "1.63.0")
    with pytest.raises(
        ConfigError, match=r"needs rustc 1\.85 or newer, and .* is 'rustc 1\.63\.0'"
    ):
        find_toolchain()
