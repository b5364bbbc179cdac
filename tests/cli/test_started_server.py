"""The vLLM server that a command starts for itself, and what is left of it."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from ludic.inference import VLLMChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.runs.settings import RunConfig, parse_run
from ludic.runs.vllm_backend import open_vllm
from tests.cli.conftest import started
from tests.inference.vllm.stand_in import all_end, stand_in_python, started_pids

SIZES = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "layers": 1}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    found = tmp_path / "temporary"
    found.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    return found


def left_in(temporary: Path) -> list[Path]:
    return list(temporary.glob("ludic-vllm-*"))


def config_of(tmp_path: Path) -> RunConfig:
    return parse_run(
        '[env]\nkind = "tic_tac_toe"\n[inference]\nbackend = "vllm"\n'
        f'vllm_python = "{stand_in_python(tmp_path)}"\n'
    )


async def opened(config: RunConfig, folder: Path | None, stack: AsyncExitStack) -> None:
    await open_vllm(config, tiny_model(**SIZES), tiny_tokenizer(), stack, folder)


@pytest.mark.parametrize("in_run_folder", [False, True])
async def test_nothing_is_left_in_the_temporary_folder(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, in_run_folder: bool
) -> None:
    async def connect(*_: object, **__: object) -> None:
        """The stand-in knows none of the routes that this asks."""

    monkeypatch.setattr(VLLMChatClient, "connect", connect)
    async with AsyncExitStack() as stack:
        await opened(config_of(tmp_path), tmp_path / "run" if in_run_folder else None, stack)
        pids = started_pids(tmp_path)
        model = left_in(temporary)[0] / "model.safetensors"
        assert model.is_file() is not in_run_folder
    assert all_end(pids, 1)
    assert not left_in(temporary)
    if in_run_folder:
        assert (tmp_path / "run/vllm/server.log").is_file()


async def test_a_start_that_is_cancelled_leaves_no_server(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SLEEPS_S", "300")
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(opened(config_of(tmp_path), None, stack))
        pids = await asyncio.to_thread(started_pids, tmp_path)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert all_end(pids, 1)
    assert not left_in(temporary)


async def test_a_start_that_is_cancelled_while_the_model_is_saved_leaves_no_file(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = threading.Event()

    def slow(model: object, where: Path, *, merged: bool) -> None:
        saving.set()
        time.sleep(1.0)
        where.mkdir(exist_ok=True)
        (where / "model.safetensors").touch()

    monkeypatch.setattr("ludic.runs.vllm_backend.save_for_vllm", slow)
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(opened(config_of(tmp_path), None, stack))
        await asyncio.to_thread(saving.wait, 30)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    await asyncio.sleep(1.5)
    assert not left_in(temporary)
    assert not (tmp_path / "pids").exists()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("command", "signals"),
    [
        ("doctor tic-tac-toe", [signal.SIGINT]),
        ("train tic-tac-toe --out run", [signal.SIGINT, signal.SIGINT]),
        ("train tic-tac-toe --out run", [signal.SIGTERM]),
    ],
)
def test_a_command_that_is_ended_while_its_server_starts_leaves_nothing(
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    signals: list[signal.Signals],
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("STAND_IN_SLEEPS_S", "300")
    python = stand_in_python(tmp_path)
    backend = ["inference.backend=vllm", f"inference.vllm_python={python}"]
    with started(tmp_path, *command.split(), *backend) as process:
        pids = started_pids(tmp_path)
        time.sleep(0.5)
        for sign in signals:
            process.send_signal(sign)
            time.sleep(0.5)
        process.communicate(timeout=60)
    assert all_end(pids)
    deadline = time.monotonic() + 10
    while left_in(temporary) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_in(temporary)
