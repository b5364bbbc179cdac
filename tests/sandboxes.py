"""Tests that need bubblewrap have the mark `sandbox`.

Where bubblewrap cannot be used they are skipped, with the reason. With LUDIC_SANDBOX_TESTS=required
(as in `make test-sandbox`) they fail instead where it is not installed; a kernel that allows no
namespaces is still a reason to skip. Those that compile Rust have the mark `rust` too.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from ludic.errors import ConfigError


def mark_by_name(item: pytest.Item) -> None:
    """Marks a test that is given the sandbox `bubblewrap` by a fixture or a parameter."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    fixtures = getattr(item, "fixturenames", ())
    if "bubblewrap" in fixtures or "bubblewrap" in [v for v in params.values() if type(v) is str]:
        item.add_marker(pytest.mark.sandbox)


def need_bubblewrap() -> None:
    """Skips or fails the test where the default sandbox cannot be used."""
    from ludic.envs.code_exec.sandbox.base import SandboxUnavailableError
    from ludic.envs.code_exec.sandbox.bubblewrap import check_bubblewrap

    try:
        check_bubblewrap()
    except SandboxUnavailableError as error:
        required = os.environ.get("LUDIC_SANDBOX_TESTS") == "required"
        if required and (not shutil.which("bwrap") or _namespaces_are_allowed()):
            pytest.fail(str(error))
        pytest.skip(str(error))


def need_rust() -> None:
    """Skips the test where there is no compiler for Rust, or fails it if it has to be there."""
    from ludic.envs.rustorio.crate import find_toolchain

    try:
        find_toolchain()
    except ConfigError as error:
        if os.environ.get("LUDIC_SANDBOX_TESTS") == "required":
            pytest.fail(str(error))
        pytest.skip(str(error))


def _namespaces_are_allowed() -> bool:
    """Whether the kernel lets an ordinary user have a user namespace, asked without our code."""
    ordinary = 65534 if os.geteuid() == 0 else None
    asked = subprocess.run(
        ["unshare", "--user", "true"], user=ordinary, capture_output=True, timeout=60, check=False
    )
    return asked.returncode == 0
