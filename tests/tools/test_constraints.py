"""The pins: names and versions only, complete, and in step with what the package asks for."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.constraints import EXTRAS, GROUP, closure, group_requirements


@pytest.fixture(scope="module")
def project(repo_root: Path) -> dict[str, Any]:
    return tomllib.loads((repo_root / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins(repo_root: Path) -> dict[str, str]:
    lines = (repo_root / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    for line in pinned:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line), line
    return dict(line.split("==") for line in pinned)


def test_torch_is_pinned_without_a_build(pins: dict[str, str]) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", pins["torch"])


def test_everything_that_make_installs_is_pinned_to_a_version_that_fits(
    project: dict[str, Any], pins: dict[str, str]
) -> None:
    extras = project["project"]["optional-dependencies"]
    own = project["project"]["name"]
    wanted = [Requirement(text) for text in project["project"]["dependencies"]]
    wanted += list(group_requirements(project["dependency-groups"], GROUP))
    waiting = list(EXTRAS)
    while waiting:
        for requirement in map(Requirement, extras[waiting.pop()]):
            if requirement.name == own:
                waiting += requirement.extras
            else:
                wanted.append(requirement)
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate():
            version = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), requirement


def test_every_pin_runs_on_the_oldest_python_that_the_package_allows(
    project: dict[str, Any], pins: dict[str, str]
) -> None:
    oldest = Version(project["project"]["requires-python"].removeprefix(">="))
    asked = {
        dist.name: dist.metadata["Requires-Python"]
        for dist in distributions()
        if pins.get(canonicalize_name(dist.name)) == re.sub(r"\+.*", "", dist.version)
    }
    assert len(asked) > 50
    assert [
        n for n, python in asked.items() if not SpecifierSet(python or "").contains(oldest)
    ] == []


def test_the_closure_of_a_requirement_holds_what_it_needs_and_no_build_suffix() -> None:
    versions = closure([Requirement("aiohttp")])
    assert {"aiohttp", "yarl", "multidict"} <= versions.keys()
    assert all("+" not in version for version in versions.values())


def test_a_requirement_that_is_not_installed_is_said() -> None:
    with pytest.raises(SystemExit, match="no-such-package"):
        closure([Requirement("no-such-package-anywhere")])
