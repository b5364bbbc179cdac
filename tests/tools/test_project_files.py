"""What stands around the code agrees with it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

import ludic


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_hosted_ci_runs_what_must_hold_here_on_every_python_that_is_promised(
    repo_root: Path,
) -> None:
    (job,) = read_yaml(repo_root / ".github/workflows/ci.yml")["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    promised = [
        name.rpartition(" ")[2]
        for name in project(repo_root)["project"]["classifiers"]
        if name.startswith("Programming Language :: Python :: 3.")
    ]
    assert job["strategy"]["matrix"]["python"] == promised


def test_the_hooks_before_a_commit_fetch_nothing(repo_root: Path) -> None:
    repositories = read_yaml(repo_root / ".pre-commit-config.yaml")["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = {hook["id"]: hook for hook in repositories[0]["hooks"]}
    assert {hook["language"] for hook in hooks.values()} == {"system"}
    assert hooks["mypy"]["entry"] == "make types"


def test_the_citation_names_this_version_and_this_licence(repo_root: Path) -> None:
    citation = read_yaml(repo_root / "CITATION.cff")
    assert citation["version"] == ludic.__version__
    assert citation["license"] == project(repo_root)["project"]["license"]


def test_the_package_says_that_it_is_typed(repo_root: Path) -> None:
    described = project(repo_root)
    assert "Typing :: Typed" in described["project"]["classifiers"]
    assert (repo_root / "src/ludic/py.typed").is_file()
    assert "py.typed" in described["tool"]["setuptools"]["package-data"]["*"]
