"""Adapters where their packages are not installed: nothing is imported early, one sentence each."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from ludic.agents.mcp import mcp_server
from ludic.errors import ConfigError, MissingExtraError
from ludic.registry import list_envs, make_env

ASKED = {
    "gymnasium": {"id": "FrozenLake-v1"},
    "textarena": {"id": "GuessTheNumber-v0"},
    "reasoning_gym": {"task": "chain_sum"},
    "verifiers": {"id": "some-env"},
}


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(("name", "kwargs"), ASKED.items())
def test_a_missing_package_is_named_with_its_extra(
    name: str, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(name, monkeypatch)
    with pytest.raises(MissingExtraError, match=rf"pip install -e '\.\[{name}\]'"):
        make_env(name, **kwargs)


def test_tools_of_a_server_want_the_package_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without("mcp", monkeypatch)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[mcp\]'"):
        mcp_server({"command": ["server"]})


def test_a_package_that_is_there_but_broken_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "textarena.py").write_text("import a_module_that_is_nowhere")
    without("textarena", monkeypatch)
    monkeypatch.delitem(sys.modules, "textarena")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="is installed but cannot be imported: No module named"):
        make_env("textarena", id="GuessTheNumber-v0")


def test_the_list_of_environments_imports_none_of_the_packages() -> None:
    assert set(ASKED) <= set(list_envs())
    code = (
        "import sys, ludic.agents, ludic.interaction.factories, ludic.envs.adapters.textarena\n"
        "from ludic.envs.adapters import gymnasium, reasoning_gym, verifiers\n"
        "import ludic.agents.mcp\n"
        f"found = set(sys.modules) & {{*{list(ASKED)!r}, 'mcp', 'torch'}}\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
