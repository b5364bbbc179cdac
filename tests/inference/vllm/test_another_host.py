"""A real vLLM server that does not see the trainer's shared memory, as on another host: it is in a
mount namespace of its own. Skipped, with a word, where that cannot be made."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ludic.distributed import weights_http
from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.distributed.weights_http import PieceFile
from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import VLLMServer
from ludic.sharding.weights import ModelWeights
from tests.inference.vllm.asking import PATIENT, request
from tests.inference.vllm.conftest import NAME, VLLM_PYTHON, server_model, tiny_server
from tests.inference.vllm.test_publish import assert_serves

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

ALONE = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    tmp_path = tmp_path_factory.mktemp("elsewhere")
    probe = subprocess.run([*ALONE, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mount namespaces here: {probe.stderr.strip()}")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join([*ALONE, VLLM_PYTHON])} "$@"\n')
    python.chmod(0o755)
    server = tiny_server(model_folder, tmp_path / "server.log")
    server.build = replace(server.build, python=str(python))
    with server:
        yield server


async def test_auto_has_it_fetch_by_http_all_weights_and_then_a_difference(
    server: VLLMServer, tokenizer: Any
) -> None:
    async with VLLMChatClient(server.url, model=NAME) as client:
        await client.connect(tokenizer=tokenizer, timeout_s=600.0)
        publisher = BroadcastPolicyPublisher(client, differences=True, **PATIENT)
        newer = server_model(seed=9)
        for version, sent in ((1, "weights"), (2, "difference")):
            newer.model.norm.weight.data[:3] += 0.1
            report = await publisher.publish(ModelWeights(newer), version)
            assert (report.details["plane"], report.details["sent"]) == ("http", sent)
            await assert_serves(client, newer, version)
        assert publisher.choice is not None
        assert "NCCL is not possible" in publisher.choice.why


async def test_it_samples_with_the_old_weights_for_as_long_as_it_fetches(
    server: VLLMServer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, let_go = threading.Event(), threading.Event()

    def drips(self: Any, file: PieceFile, handle: int) -> None:
        asked.set()
        self._head(206, file.size)
        sent = 0
        while not let_go.wait(0.5):
            sent += self.wfile.write(os.pread(handle, 1, sent))
        self.wfile.write(os.pread(handle, file.size, sent))

    monkeypatch.setattr(weights_http._Handler, "_send", drips)
    async with VLLMChatClient(server.url, model=NAME) as client:
        await client.connect(tokenizer=tokenizer, timeout_s=600.0)
        publisher = BroadcastPolicyPublisher(client, **PATIENT)
        publishing = asyncio.create_task(publisher.publish(ModelWeights(server_model(seed=8)), 3))
        try:
            assert await asyncio.to_thread(asked.wait, 600.0)
            await client.complete_tokens(request(timeout_s=100.0))
            assert not publishing.done()
        finally:
            let_go.set()
        await publishing
        await assert_serves(client, server_model(seed=8), 3)
