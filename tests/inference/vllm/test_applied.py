"""What a real server says of the updates that it has taken, where it keeps no versions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.inference.vllm.client import VLLMChatClient
from ludic.sharding.weights import ModelWeights
from tests.inference.vllm.conftest import server_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]


async def test_a_server_that_keeps_no_versions_shows_that_it_was_not_restarted(
    client: VLLMChatClient, publisher: BroadcastPolicyPublisher
) -> None:
    replica = client.replicas[0]
    await publisher.publish(ModelWeights(server_model(seed=9)), 7)
    assert replica.facts is not None
    replica.facts = replace(replica.facts, names_versions=False)  # as vLLM 0.26
    before = await client._applied(replica, 30)
    assert before >= 2  # the fixture's, and ours
    assert await client.replica_version(replica) == 7
    await publisher.publish(ModelWeights(server_model(seed=10)), 8)
    assert await client._applied(replica, 30) == before + 1
