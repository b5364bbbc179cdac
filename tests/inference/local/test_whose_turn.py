"""Who may change the weights, and in which order; and who gives the queue's places back."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from ludic.errors import DeadlineError, PublishError, QueueFullError
from ludic.inference.local import LocalChatClient
from ludic.inference.tiny import tiny_model
from tests.inference.local.asking import request, until

_NAME = "model.layers.0.self_attn.q_proj.weight"


async def test_an_older_version_that_comes_late_leaves_the_newer_weights(
    model: Any, tokenizer: Any
) -> None:
    six, five = tiny_model(seed=6), tiny_model(seed=5)
    async with LocalChatClient(model, tokenizer) as client:
        newer, older = await asyncio.gather(
            client.sync_weights(dict(six.state_dict()), version=6),
            client.sync_weights(dict(five.state_dict()), version=5),
            return_exceptions=True,
        )
        assert await client.get_policy_version() == 6
    assert "copied" in str(newer)
    assert isinstance(older, PublishError)
    assert torch.equal(model.state_dict()[_NAME], six.state_dict()[_NAME])


def another_task(
    client: LocalChatClient, params: dict[str, Any], **options: Any
) -> tuple[asyncio.Event, asyncio.Task[str]]:
    """A task that was started outside of every update, and syncs when told to."""
    begin = asyncio.Event()

    async def sync() -> str:
        await begin.wait()
        return await client.sync_weights(params, **options)

    return begin, asyncio.create_task(sync())


async def test_weights_of_another_task_wait_until_an_update_is_over(
    model: Any, tokenizer: Any
) -> None:
    other = tiny_model(seed=5)
    before = model.state_dict()[_NAME].clone()
    async with LocalChatClient(model, tokenizer) as client:
        begin, sync = another_task(client, dict(other.state_dict()), version=11)
        async with client.updating(version=10):
            begin.set()
            await asyncio.sleep(0.05)
            assert not sync.done()
            assert torch.equal(model.state_dict()[_NAME], before)
        assert "copied" in await sync
        assert await client.get_policy_version() == 11
    assert torch.equal(model.state_dict()[_NAME], other.state_dict()[_NAME])


async def test_weights_that_waited_go_where_the_update_before_put_its_own(
    model: Any, tokenizer: Any
) -> None:
    other = tiny_model(seed=5)
    projection = model.model.layers[0].self_attn.q_proj
    async with LocalChatClient(model, tokenizer) as client:
        begin, sync = another_task(client, dict(other.state_dict()), version=2)
        async with client.updating(version=1):
            begin.set()
            await asyncio.sleep(0.02)
            projection.weight = torch.nn.Parameter(torch.zeros(64, 64))
        await sync
    assert torch.equal(projection.weight, other.state_dict()[_NAME])


async def test_weights_of_another_task_wait_no_longer_than_their_deadline(
    model: Any, tokenizer: Any
) -> None:
    async with LocalChatClient(model, tokenizer) as client:
        begin, sync = another_task(client, {}, version=2, timeout_s=0.05)
        async with client.updating(version=1):
            begin.set()
            with pytest.raises(DeadlineError):
                await sync


async def test_the_holder_of_an_update_does_not_wait_for_itself(model: Any, tokenizer: Any) -> None:
    own = dict(model.state_dict())
    async with LocalChatClient(model, tokenizer, request_timeout_s=60.0) as client:
        async with client.updating():
            await client.sync_weights(own, version=1)
            await asyncio.wait_for(client.sync_weights(own, version=2), 60.0)
            await asyncio.gather(client.sync_weights(own, version=3))
        assert await client.get_policy_version() == 3


async def test_an_array_that_is_no_tensor_is_named(model: Any, tokenizer: Any) -> None:
    async with LocalChatClient(model, tokenizer) as client:
        with pytest.raises(PublishError, match=r"q_proj.*ndarray.*give a tensor"):
            await client.sync_weights({_NAME: np.zeros((64, 64))}, version=1)


async def test_those_that_give_up_during_an_update_make_room_in_the_queue(
    model: Any, tokenizer: Any
) -> None:
    async with LocalChatClient(model, tokenizer, max_queue=2, on_full="raise") as client:
        async with client.updating():
            late = [
                asyncio.create_task(
                    client.complete_tokens(request([1], max_tokens=1, timeout_s=0.05))
                )
                for _ in range(2)
            ]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await client.complete_tokens(request([2], max_tokens=1))
            for result in await asyncio.gather(*late, return_exceptions=True):
                assert isinstance(result, DeadlineError)
            await until(lambda: client.stats()["waiting"] == 0)
            next_one = asyncio.create_task(client.complete_tokens(request([2], max_tokens=1)))
            await asyncio.sleep(0.02)
            assert not next_one.done()
        assert (await next_one).trace is not None
        assert client.stats()["cancelled"] == 2
