"""Which sandboxes this machine has.

A test that needs bubblewrap where it cannot be used is skipped, with the reason. With
LUDIC_SANDBOX_TESTS=required (as in `make test-sandbox`) it fails instead where bubblewrap is not
installed; a kernel that allows no namespaces is still a reason to skip. With
LUDIC_SANDBOX_TESTS=elsewhere it is left to such a run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from ludic.envs.code_exec.sandbox import SandboxPool, SandboxUnavailableError
from ludic.envs.code_exec.sandbox.bubblewrap import check_bubblewrap


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("sandbox"):
        need_bubblewrap()


def need_bubblewrap() -> None:
    """Skips or fails the test where the default sandbox cannot be used."""
    wanted = os.environ.get("LUDIC_SANDBOX_TESTS", "")
    if wanted == "elsewhere":
        pytest.skip("left to `make test-sandbox`")
    try:
        check_bubblewrap()
    except SandboxUnavailableError as error:
        if wanted == "required" and (not shutil.which("bwrap") or namespaces_are_allowed()):
            pytest.fail(str(error))
        pytest.skip(str(error))


def namespaces_are_allowed() -> bool:
    """Whether the kernel lets an ordinary user have a user namespace, asked without our code."""
    ordinary = 65534 if os.geteuid() == 0 else None
    asked = subprocess.run(
        ["unshare", "--user", "true"], user=ordinary, capture_output=True, timeout=60, check=False
    )
    return asked.returncode == 0


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[str, SandboxPool]]:
    """One pool of each kind for the whole session, as a run has it."""
    made: dict[str, SandboxPool] = {}
    yield made
    for pool in made.values():
        pool.close()


def pool_of(pools: dict[str, SandboxPool], name: str) -> SandboxPool:
    if name == "bubblewrap" or os.environ.get("LUDIC_SANDBOX_TESTS") == "elsewhere":
        need_bubblewrap()
    if name not in pools:
        pools[name] = SandboxPool(name, workers=2)
    return pools[name]


@pytest.fixture(params=["bubblewrap", "plain"])
def pool(request: pytest.FixtureRequest, pools: dict[str, SandboxPool]) -> SandboxPool:
    """Each sandbox that the machine has, in a pool."""
    return pool_of(pools, request.param)


@pytest.fixture
def bubblewrap(pools: dict[str, SandboxPool]) -> SandboxPool:
    """The default sandbox, in a pool."""
    return pool_of(pools, "bubblewrap")
