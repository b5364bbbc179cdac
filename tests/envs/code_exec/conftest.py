"""One pool of each kind of sandbox, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ludic.envs.code_exec.sandbox.pool import SandboxPool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[str, SandboxPool]]:
    """One pool of each kind for the whole session, as a run has it."""
    made: dict[str, SandboxPool] = {}
    yield made
    for pool in made.values():
        pool.close()


def pool_of(pools: dict[str, SandboxPool], name: str) -> SandboxPool:
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
