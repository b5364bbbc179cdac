"""Run by torchrun: two ranks publish a model that they share, and compare it with the gathered one.

Usage: publishing_ranks.py plain lora apart fails fails-lora; or, with a real server,
publishing_ranks.py "URL FILE", where the gathered weights go into the file.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ludic.distributed import BroadcastPolicyPublisher, local, shards
from ludic.distributed.interfaces import PolicyPublisher, PublishReport, Weights, named_tensors
from ludic.distributed.local import Rank0OnlyPublisher
from ludic.distributed.vllm.checksums import receipt
from ludic.distributed.vllm.shared_memory import SharedWeights
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from ludic.sharding.fsdp import init_mesh, shard_policy
from ludic.sharding.weights import ModelWeights
from ludic.sharding.world import World
from tests.inference.vllm.asking import PATIENT


class Policy(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Keeping(PolicyPublisher):
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.weights: Weights = {}

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        self.weights = weights
        return PublishReport(version, 0.0)


class Gathered:
    """The largest tensor that this rank gathered on its device, in elements."""

    largest = 0

    def __enter__(self) -> Gathered:
        self._gather = DTensor.full_tensor

        def watched(tensor: DTensor, **settings: Any) -> Tensor:
            self.largest = max(self.largest, tensor.numel())
            return self._gather(tensor, **settings)

        DTensor.full_tensor = watched  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        DTensor.full_tensor = self._gather  # type: ignore[method-assign]


def made(what: str) -> nn.Module:
    if what.startswith("http"):
        return cast(nn.Module, tiny_model(3, hidden_size=64, heads=2, kv_heads=1))
    model: Any = tiny_model(3).bfloat16()
    if what in ("lora", "fails-lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.01)
    return cast(nn.Module, model)


async def check_publish(what: str, model: nn.Module, world: World) -> None:
    keeping = Keeping()
    publisher = Rank0OnlyPublisher(keeping if world.leads else None, world)
    with Gathered() as gathered:
        await publisher.publish(ModelWeights(model), 1)
    expected = receipt(ModelWeights(model))
    if world.leads:
        assert isinstance(keeping.weights, SharedWeights) == (what != "apart")
        assert receipt(named_tensors(keeping.weights)) == expected
    sharded = [p.numel() for n, p in model.named_parameters() if "lora" in n or "base_layer" in n]
    most = {"plain": 0, "lora": max(sharded, default=0)}
    assert gathered.largest <= most.get(what, 10**9), gathered.largest
    print(f"{what.upper()} rank {world.rank} gathered {gathered.largest} elements", flush=True)
    if isinstance(keeping.weights, SharedWeights):
        path = keeping.weights.path
        assert path.exists()
        keeping.weights = {}
        assert not path.exists()


def fail(path: object, layout: object, parts: Iterator[object]) -> None:
    next(parts)
    raise OSError("injected")


async def check_failure(model: nn.Module, world: World) -> None:
    keeping = Keeping()
    publisher = Rank0OnlyPublisher(keeping if world.leads else None, world)
    try:
        await publisher.publish(ModelWeights(model), 1)
    except Exception as exc:
        print(f"RAISED {type(exc).__name__}: {exc}", flush=True)
    assert keeping.weights == {}


async def publish_to_server(url: str, file: str, model: nn.Module, world: World) -> None:
    """Two versions: all weights, then a difference."""
    async with AsyncExitStack() as stack:
        inner = None
        if world.leads:
            client = await stack.enter_async_context(VLLMChatClient(url))
            inner = BroadcastPolicyPublisher(client, differences=True, **PATIENT)
        publisher = Rank0OnlyPublisher(inner, world)
        with Gathered() as gathered:
            reports = [await publisher.publish(ModelWeights(model), 1)]
            with torch.no_grad():
                for parameter in model.parameters():
                    rows = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    rows[:1] += 0.125
            reports.append(await publisher.publish(ModelWeights(model), 2))
        assert gathered.largest == 0
        assert [report.details["sent"] for report in reports] == ["weights", "difference"]
        assert all(report.verified for report in reports)
        whole = {name: tensor.clone() for name, tensor in ModelWeights(model)}
        if world.leads:
            save_file(whole, file)


async def check(what: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    world, model = World.of(mesh, torch.device("cpu")), made(what)
    shard_policy(Policy(model), mesh)
    if what.startswith("http"):
        url, file = what.split()
        await publish_to_server(url, file, model, world)
        return
    with pytest.MonkeyPatch.context() as patch:
        if what == "apart":  # as if the ranks were on two hosts
            patch.setattr(local, "ranks_share_memory", lambda _: False)
        if what.startswith("fails"):
            if not world.leads:
                patch.setattr(shards, "fill_shared", fail)
            await check_failure(model, world)
        else:
            await check_publish(what, model, world)


def main(*cases: str) -> None:
    torch.set_num_threads(1)
    mesh = init_mesh("cpu", timeout_s=900)
    for what in cases:
        asyncio.run(check(what, mesh))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
