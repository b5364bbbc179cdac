"""The real SmolLM2 on a real server: sampled, scored and published in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.inference.vllm.client import VLLMChatClient
from ludic.runs.doctor import run_doctor
from tests.inference.vllm.conftest import NAME, tiny_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_a_pretrained_model_agrees_before_and_after_a_publish(
    smollm2_path: Path, smollm2_tokenizer: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    server = tiny_server(smollm2_path, tmp_path / "log")
    try:
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(server.wait_until_healthy)
        async with VLLMChatClient(server.url, model=NAME) as client:
            await client.connect(tokenizer=smollm2_tokenizer)
            publisher = BroadcastPolicyPublisher(client, timeout_s=300)
            report = await run_doctor(
                model,
                smollm2_tokenizer,
                client,
                model_name=NAME,
                publisher=publisher,
                requests=4,
                max_tokens=16,
            )
    finally:
        server.stop()
    print(report.table())
    assert report.ok, report.table()
