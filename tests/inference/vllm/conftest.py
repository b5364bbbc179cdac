"""Real vLLM servers on loopback with a tiny model, shared by the tests that need them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import ServerSettings, VLLMServer, free_port
from ludic.runs.settings import check_run
from ludic.runs.vllm_backend import server_settings
from ludic.sharding.weights import ModelWeights
from tests.inference.vllm.asking import PATIENT

ROOT = Path(__file__).resolve().parents[3]
VLLM_PYTHON = os.environ.get("LUDIC_VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")
NAME = "tiny"
# Threads that are bound to cores wait for whoever else has them.
ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


def server_model(seed: int = 0) -> Qwen2ForCausalLM:
    """The model that the servers hold at first; vLLM's CPU attention wants heads of 32."""
    return tiny_model(seed, hidden_size=64, heads=2, kv_heads=1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    server_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_server(folder: Path, log: Path, **settings: Any) -> VLLMServer:
    """A server of the tiny model, not started."""
    wanted: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 32, "port": free_port()}
    wanted |= {"env": ENV, **settings}
    found = ServerSettings(str(folder), served_name=NAME, **wanted)
    return VLLMServer(found, python=VLLM_PYTHON, log=log, start_timeout_s=1800)


def server_of_a_run(folder: Path, log: Path) -> VLLMServer:
    """The same, with the settings that a run file gives a server which is started for it. It fails
    when it is told to."""
    own = {"eager": True, "flags": {"max_num_batched_tokens": 2048, "max-logprobs": 25}}
    inference = {"backend": "vllm", "max_context_tokens": 1024, "slots": 32, "vllm": own}
    model = {"precision": "float32"}
    config = check_run({"env": {"kind": "key_door"}, "model": model, "inference": inference})
    settings = server_settings(config, folder, NAME)
    failing = ("--worker-extension-cls", "failing_worker.FailingExtension")
    found = replace(settings, env=ENV, extra=(*settings.extra, *failing))
    return VLLMServer(found, python=VLLM_PYTHON, log=log, start_timeout_s=1800)


def start(server: VLLMServer) -> None:
    """Starts a server that finds `failing_worker`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        server.start()


@pytest.fixture(scope="session")
def two_servers(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMServer, VLLMServer]]:
    """Two servers that start at the same time, the second with room for a judge's long prompts,
    and able to fail. Only `test_zz_replicas.py` may end the second."""
    logs = tmp_path_factory.mktemp("logs")
    first = tiny_server(model_folder, logs / "first.log")
    second = server_of_a_run(model_folder, logs / "second.log")
    try:
        first.start()
        start(second)
        first.wait_until_healthy()
        second.wait_until_healthy()
        yield first, second
    finally:
        first.stop()
        second.stop()


@pytest.fixture(scope="session")
def server(two_servers: tuple[VLLMServer, VLLMServer]) -> VLLMServer:
    return two_servers[0]


@pytest.fixture
async def client(server: VLLMServer) -> AsyncIterator[VLLMChatClient]:
    async with VLLMChatClient(server.url, model=NAME) as found:
        yield found


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    return server_model()


@pytest.fixture
async def publisher(client: VLLMChatClient, model: Qwen2ForCausalLM) -> BroadcastPolicyPublisher:
    """A publisher whose servers have `model` as version 0, whatever a test before left there."""
    found = BroadcastPolicyPublisher(client, **PATIENT)
    await found.publish(ModelWeights(model), 0)
    return found


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
