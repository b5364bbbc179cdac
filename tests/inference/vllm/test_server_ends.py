"""A server never outlives whom it was started for, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ludic.errors import InferenceError
from ludic.inference.vllm.server import ServerSettings, VLLMServer, _group_lives, free_port
from tests.inference.vllm.stand_in import all_end, stand_in_python, started_pids

PARENT = """
import os, signal, sys, threading, time
from ludic.inference.vllm.server import ServerSettings, VLLMServer
python, folder, log, ending = sys.argv[1:]
server = VLLMServer(
    ServerSettings("m", port=int(os.environ["PORT"])), python=python, folder=folder, log=log
)
thread = threading.Thread(target=server.start)  # which ends long before the process does
thread.start()
thread.join()
server.wait_until_healthy()
print("healthy", flush=True)
if ending == "os._exit":
    os._exit(130)
time.sleep(300)
"""


@pytest.mark.parametrize("ending", ["SIGKILL", "SIGTERM", "os._exit"])
def test_a_server_and_its_children_end_with_their_parent(tmp_path: Path, ending: str) -> None:
    python = stand_in_python(tmp_path, child='trap "" TERM; sleep 300')
    folder = tmp_path / "temporary"
    arguments = [str(python), str(folder), str(tmp_path / "log"), ending]
    folder.mkdir()
    (folder / "model.safetensors").touch()
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments],
        env={**os.environ, "PORT": str(free_port())},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "healthy\n"
        pids = started_pids(tmp_path)
        time.sleep(0.5)
        if ending != "os._exit":
            assert not all_end(pids, 0), "it has to live while its parent does"
            parent.send_signal(getattr(signal, ending))
    assert all_end(pids)
    assert not folder.exists()


def server_of(tmp_path: Path, **settings: str) -> VLLMServer:
    found = ServerSettings("m", port=free_port(), env=settings)
    return VLLMServer(found, python=str(stand_in_python(tmp_path)), start_timeout_s=100)


def test_to_stop_a_server_that_starts_ends_the_wait_for_it(tmp_path: Path) -> None:
    server, said = server_of(tmp_path, STAND_IN_SLEEPS_S="300"), list[BaseException]()

    def wait() -> None:
        try:
            server.wait_until_healthy()
        except InferenceError as exc:
            said.append(exc)

    server.start()
    waiting = threading.Thread(target=wait)
    waiting.start()
    pids = started_pids(tmp_path)
    server.stop()
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    assert "before it was healthy" in str(said[0])
    assert all_end(pids, 1)


def test_a_stopped_server_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    with server_of(tmp_path) as server:
        assert server.process is not None
        pids, group = started_pids(tmp_path), server.process.pid
        assert server.log.is_file()
    assert all_end(pids, 1)
    assert not server.log.parent.exists()
    assert not _group_lives(group)  # the watcher has ended, too


def test_a_proxy_is_not_asked_for_the_servers_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with server_of(tmp_path):
        pass


def test_a_server_that_died_can_be_started_again(tmp_path: Path) -> None:
    server = server_of(tmp_path)
    server.start()
    server.wait_until_healthy()
    leader, child = started_pids(tmp_path)
    os.kill(leader, signal.SIGKILL)
    assert all_end([leader])
    (tmp_path / "pids").unlink()
    server.start()
    server.wait_until_healthy()
    assert all_end([child])  # what the first one left
    time.sleep(1.5)  # the first one's watcher would have cleared away by now
    assert server.log.is_file()
    again = started_pids(tmp_path)
    server.stop()
    assert all_end(again)
