"""The example with FSDP2, on two ranks over gloo, against a real server."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path

import pytest

from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.server import VLLMServer
from tests.inference.vllm.conftest import NAME, ROOT
from tests.inference.vllm.test_runs import is_served, on_two_ranks, output_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

EXAMPLE = ROOT / "examples" / "fsdp2_training"


async def test_math_is_trained_on_two_ranks(
    server: VLLMServer, client: VLLMChatClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    await output_of(tmp_path, "make_tiny", "--output", "tiny")
    told = await output_of(
        tmp_path,
        *on_two_ranks("train_math_fsdp2"),
        *("--model", "tiny", "--data", "tiny/rows.jsonl", "--served-name", NAME),
        *("--port", server.url.rpartition(":")[2], "--publish-timeout-s", "900"),
        *("--steps", "2", "--rollouts-per-update", "32", "--lr", "1e-3", "--output", "run"),
        *("--max-tokens", "16", "--max-seq-len", "256"),
    )
    assert "step      2" in told
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [line["train/version"] for line in lines] == [1, 2]
    assert all(isfinite(line["train/loss"]) for line in lines)
    assert all(line["train/mismatch_max"] <= 1e-3 for line in lines)
    # Some of its numbers are right, so there is something to learn from.
    assert any(line["train/grad_norm"] > 0 for line in lines)
    saved = tmp_path / "run/checkpoints/step-00000002"
    assert json.loads((saved / "manifest.json").read_text())["world_size"] == 2
    assert await is_served(client, saved)
