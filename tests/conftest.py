"""Fixtures for every test: the real SmolLM2, and settings that keep tests offline and quick."""

from __future__ import annotations

import os
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from ludic.plumbing.shapes import check_shapes
from tests.left_runs import LeftRuns
from tests.sandboxes import mark_by_name, need_bubblewrap, need_rust

# Before anything imports transformers: a test that asks a hub for a file is a broken test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Where this is set, each of the tests' many processes would compile all of its modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(Path("/dev").glob("nvidia*")):
    # Before anything imports Triton: without a GPU its kernels run as Python, so they are tested.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Before anything imports these modules: the shapes of their tensors are checked on every call
    # (not on a GPU, where the checks would come between torch.compile and what it compiles).
    check_shapes()

# No test cuts the power, and thousands of waits for the disk would show nothing. Tests of what is
# synced, and in which order, put a function of their own here.
os.fsync = os.fstat  # type: ignore[assignment]

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ADAPTED = ("gymnasium", "mcp", "reasoning_gym", "textarena", "verifiers")
ROOT = Path(__file__).resolve().parent.parent

# A busy machine must not turn a right answer into a failure: examples have no deadline.
settings.register_profile(
    "ludic",
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
    database=DirectoryBasedExampleDatabase(ROOT / ".cache" / "hypothesis"),
)
settings.register_profile("thorough", settings.get_profile("ludic"), max_examples=1000)
settings.load_profile(os.environ.get("LUDIC_HYPOTHESIS_PROFILE", "ludic"))


def seed_the_global_generators(seed: int) -> None:
    """Those of the packages that are loaded; a test that needs none of them pays for none."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    # Not the fixtures' seed: a test's draws should not repeat those of its fixtures.
    seed_the_global_generators(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seed_the_global_generators(0)
    if item.get_closest_marker("sandbox"):
        need_bubblewrap()
    if item.get_closest_marker("rust"):
        need_rust()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeftRuns(ROOT / "runs"))


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that was asked for where it cannot run says so instead of failing: a `gpu` test
    without a GPU, an `adapters` test without the packages, or those that its mark names."""
    absent = pytest.mark.skip(reason="without the other packages: `make test-adapters` has them")
    for item in items:
        mark_by_name(item)
        mark = item.get_closest_marker("adapters")
        if mark and any(find_spec(package) is None for package in mark.args or ADAPTED):
            item.add_marker(absent)
    _need_redis([item for item in items if item.get_closest_marker("redis")])
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def _need_redis(wanted: list[pytest.Item]) -> None:
    """Without a redis-server they are skipped, with a word; `make test-pipeline` sets
    LUDIC_NEEDS_REDIS, and then a missing server is a failure."""
    if not wanted or os.environ.get("LUDIC_NEEDS_REDIS"):
        return
    from ludic.errors import PipelineError
    from ludic.pipeline.local_redis import find_redis_server

    try:
        find_redis_server()
    except PipelineError as exc:
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason=str(exc)))


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory outside of the checkout."""
    folder = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of the real SmolLM2-135M-Instruct; `python -m tools.smollm2` makes it."""
    from tools import smollm2

    return smollm2.path()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> PreTrainedTokenizerFast:
    """The real SmolLM2 tokenizer, with its ChatML template; shared, so do not change it."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_path)
    return tokenizer
