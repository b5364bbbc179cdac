"""The doctor against a real server."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2ForCausalLM

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.inference.vllm.client import VLLMChatClient
from ludic.runs.doctor import run_doctor
from tests.inference.vllm.conftest import NAME, server_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]


async def test_sampler_and_trainer_agree_before_and_after_a_publish(
    client: VLLMChatClient,
    publisher: BroadcastPolicyPublisher,
    model: Qwen2ForCausalLM,
    tokenizer: Any,
) -> None:
    report = await run_doctor(
        model, tokenizer, client, model_name=NAME, publisher=publisher, requests=8, max_tokens=12
    )
    print(report.table())
    assert report.ok, report.table()
    measured = [row for row in report.rows if not row.note]
    assert len(measured) == 6
    assert max(row.max for row in measured) <= 1e-3
    # The CPU build cannot say which ids it kept, so the trainer would refuse such samples.
    assert all("which ids truncated sampling kept" in row.note for row in report.rows if row.note)


async def test_a_server_with_other_weights_is_found_out(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher, tokenizer: Any
) -> None:
    other = server_model(seed=5)
    report = await run_doctor(other, tokenizer, client, model_name=NAME, requests=4, max_tokens=6)
    assert not report.ok
