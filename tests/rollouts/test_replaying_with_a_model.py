"""Sampling again from the in-process engine gives the same tokens, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.templates.hf import HFChatTemplate
from ludic.interaction.base import Runtime
from ludic.rollouts import GRPORequestStrategy, RolloutEngine, replay
from tests.rollouts.worlds import ENVS, protocols, request

pytestmark = pytest.mark.integration


async def test_a_real_model_samples_the_same_episodes_again() -> None:
    from ludic.inference.local.client import LocalChatClient
    from ludic.inference.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    template = HFChatTemplate(tokenizer)
    registries: dict[str, Any] = {"env_registry": ENVS, "protocol_registry": protocols()}
    spec = InferenceSpec(SamplingConfig(max_tokens=6))
    async with LocalChatClient(tiny_model(seed=0), tokenizer, max_slots=4) as client:
        runtime = Runtime(client, template, "tiny", spec)
        running = RolloutEngine(runtime=runtime, **registries)
        asked = GRPORequestStrategy(2).expand([request(), request("duel")])
        rollouts = await running.generate_rollouts(asked, max_steps=3, concurrency=4)
        assert all(r.error is None for r in rollouts)
        assert len({r.agent_steps[0].trace for r in rollouts if r.agent_steps}) > 1
        for episode in sorted({r.episode_id for r in rollouts}):
            mine = [r for r in rollouts if r.episode_id == episode]
            report = await replay(mine, runtime=runtime, **registries)
            assert report.matches, str(report.divergence)
            assert report.tokens == sum(r.num_tokens for r in mine) > 0
    async with LocalChatClient(tiny_model(seed=1), tokenizer, max_slots=4) as other:
        report = await replay(mine, runtime=Runtime(other, template, "tiny", spec), **registries)
        assert report.divergence is not None
        assert report.divergence.field in ("completion_token_ids", "completion_logprobs")
