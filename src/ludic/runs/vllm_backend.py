"""The run's tokens from vLLM: servers by address, or one that is started for the run; and the way
that the weights take to them."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ludic.distributed import (
    AdapterPolicyPublisher,
    BroadcastPolicyPublisher,
    ModelWeights,
    PolicyPublisher,
)
from ludic.distributed.addresses import own_address, refusal_to_bind
from ludic.distributed.publisher import ServerPublisher
from ludic.distributed.vllm.canary import MismatchBudget
from ludic.distributed.vllm.delivery import Payload
from ludic.distributed.vllm.planes import DataPlane, HTTPPlane, open_plane
from ludic.distributed.vllm.weights_payload import WeightsPayload
from ludic.errors import ConfigError
from ludic.inference import VLLMChatClient
from ludic.inference.client import ChatClient
from ludic.inference.vllm.server import ServerSettings, VLLMServer, free_port
from ludic.memory.plan import Plan
from ludic.plumbing.precision import sampling_dtype
from ludic.runs.memory import server_shares_gpu, share_of_server, snapshots_fit
from ludic.runs.model import check_device, precision_of
from ludic.runs.results.terminal import say
from ludic.runs.settings import RunConfig
from ludic.runs.settings.base import read_key
from ludic.runs.settings.deadlines import server_return_s
from ludic.sharding.ranks import launched
from ludic.sharding.weights import plain_name
from ludic.training.checkpoint_contents import no_progress_bar

ASKING_S = 60.0
_NAME = "policy"
"""What a server that is started for the run calls its model."""


async def open_vllm(
    config: RunConfig,
    model: nn.Module,
    tokenizer: Any,
    stack: AsyncExitStack,
    folder: Path | None,
    plan: Plan | None = None,
) -> tuple[ChatClient, PolicyPublisher]:
    """Returns a client and a publisher for the run's servers; `stack` ends what was started. `plan`
    is that of the trainer's memory, which says whether snapshots may stay on its GPU.

    Servers that were running already may have any weights: the model's are published to them
    first."""
    servers, name = config.inference.servers, config.model.name
    patience_s = ASKING_S if servers else config.inference.vllm.start_timeout_s
    key = read_key(config.inference, "inference")
    roster = None
    if servers == "registered":
        from ludic.runs.pipeline.roster import Roster  # which needs the extra `redis`

        roster = Roster(config, folder)
        stack.callback(roster.close)
        patience_s = server_return_s(config)
        servers, key = await roster.wait(patience_s), roster.key
    adapter = config.inference.publish_lora == "adapter"
    if adapter and config.model.lora is None:
        raise ConfigError(
            'inference.publish_lora = "adapter", but the model has no adapter: set [model.lora] '
            "with a rank, or leave publish_lora out"
        )
    if not servers:
        name, servers = _NAME, [await _start(config, model, tokenizer, stack, folder)]
    longest = config.inference.max_context_tokens
    client = VLLMChatClient(servers, model=name, api_key=key, max_context_tokens=longest)
    stack.push_async_callback(client.close)
    await client.connect(tokenizer=tokenizer, timeout_s=patience_s)
    publisher: ServerPublisher
    timeout_s = config.training.publish_timeout_s
    if adapter:
        publisher = lent = AdapterPolicyPublisher(client, timeout_s=timeout_s)
        stack.push_async_callback(lent.close)
    else:
        budget = MismatchBudget.for_dtype(precision_of(config))
        device = next(model.parameters()).device
        room = plan is not None and await asyncio.to_thread(snapshots_fit, plan, model)
        differences = config.inference.publish_differences  # of copies on the host
        on_host = launched().size > 1 or (plan is not None and not room) or differences
        named = config.inference.publish_plane == "ipc"
        plane = await plane_of(config, client, device, gathered=on_host and not named)
        publisher = BroadcastPolicyPublisher(
            client, plane=plane, budget=budget, differences=differences, timeout_s=timeout_s
        )
        stack.callback(_close_door, publisher.payload)
        if publisher.snapshots == "device" and not room:
            publisher.snapshots = "none"  # published while the trainer waits
    if roster is not None:
        publisher.before = partial(_follow, roster, config, publisher, model)
        publisher.servers_s = server_return_s(config)
    if adapter or config.inference.servers:
        await publisher.publish(ModelWeights(model), client.first_version)
    return client, publisher


def _close_door(payload: Payload) -> None:
    """Ends the server from which hosts fetched weights, if there is one."""
    if isinstance(payload, WeightsPayload) and isinstance(payload.plane, HTTPPlane):
        payload.plane.close()


async def _follow(
    roster: Any, config: RunConfig, publisher: ServerPublisher, model: nn.Module
) -> None:
    """When a publish begins: it goes to the servers that are there now, by a way that they have.
    Where none answers, it waits for one that is being started again."""
    client = publisher.client

    async def update() -> bool:
        async with publisher.turn("the list of servers", publisher.servers_s):
            return bool(await roster.update(client))

    changed = await update()
    while not await client.any_answers():
        await asyncio.sleep(1.0)
        changed |= await update()
    payload = publisher.payload
    if changed and client.replicas and isinstance(payload, WeightsPayload):
        device = next(model.parameters()).device
        # Where the weights come from is settled with the first plane.
        on_host = launched().size > 1 or publisher.snapshots == "host"
        async with publisher.turn("a way to the servers"):
            if isinstance(payload.plane, DataPlane):
                payload.plane.close()
            payload.plane = await plane_of(config, client, device, gathered=on_host)


async def _start(
    config: RunConfig, model: nn.Module, tokenizer: Any, stack: AsyncExitStack, folder: Path | None
) -> str:
    """Saves the model where the server can read it, waits until the server is healthy, and returns
    its address. What ends it is on `stack` before it begins, since any wait may be cancelled."""
    own = tempfile.TemporaryDirectory(prefix="ludic-vllm-", ignore_cleanup_errors=True)
    temporary = Path(stack.enter_context(own))
    where = temporary if folder is None else folder / "vllm"
    where.mkdir(parents=True, exist_ok=True)
    adapter = config.inference.publish_lora == "adapter"
    share = share_of_server(config, model)
    settings = replace(server_settings(config, where, _NAME), gpu_memory_utilization=share)
    server = VLLMServer(
        settings,
        python=config.inference.vllm_python,
        log=where / "server.log",
        start_timeout_s=config.inference.vllm.start_timeout_s,
        folder=temporary,
    )
    stack.callback(server.stop)

    def save() -> None:
        with no_progress_bar():
            save_for_vllm(model, where, merged=not adapter)
        tokenizer.save_pretrained(where)

    taking = "" if share is None else f" with {share:.1%} of the GPU's memory"
    say(f"starting a vLLM server for this run{taking}; this takes a minute")
    saving = asyncio.create_task(asyncio.to_thread(save))
    stack.push_async_callback(asyncio.wait, {saving})  # a thread goes on when it is cancelled
    await asyncio.shield(saving)
    server.start()
    await asyncio.to_thread(server.wait_until_healthy)
    return server.url


def server_settings(config: RunConfig, model: Path, name: str) -> ServerSettings:
    """Returns how a server is started for the run: the model in a folder, under a name."""
    adapter = config.inference.publish_lora == "adapter"
    lora, vllm = config.model.lora, config.inference.vllm
    return ServerSettings(
        model=str(model),
        served_name=name,
        port=free_port(),
        dtype=str(sampling_dtype(precision_of(config))).removeprefix("torch."),
        max_model_len=config.inference.max_context_tokens,
        max_num_seqs=config.slots,
        max_lora_rank=lora.rank if adapter and lora is not None else None,
        gpu_memory_utilization=vllm.gpu_memory,
        eager=vllm.eager,
        kv_cache_gib=vllm.kv_cache_gib,
        extra=vllm.arguments(),
    )


def save_for_vllm(model: nn.Module, where: Path, *, merged: bool) -> None:
    """Saves the model under its own names: PEFT's are unknown to vLLM. `merged`: with the adapter,
    as the policy is; else the weights below it."""
    if not hasattr(model, "get_base_model"):
        model.save_pretrained(where)  # type: ignore[operator]
        return
    weights = (
        dict(ModelWeights(model))
        if merged
        else {plain_name(n): p for n, p in model.named_parameters() if ".lora_" not in n}
    )
    model.get_base_model().save_pretrained(where, state_dict=weights)  # type: ignore[operator]


async def plane_of(
    config: RunConfig, client: VLLMChatClient, device: torch.device, *, gathered: bool
) -> DataPlane:
    """Returns the plane that the run names, or else the one that fits where its servers are, and
    says why. `gathered`: the weights come from several ranks, or from a snapshot on the host."""
    section = config.inference
    plane, choice = await open_plane(
        client,
        device,
        named=section.publish_plane,
        gathered=gathered,
        host=section.publish_address,
        port=section.publish_port,
        timeout_s=ASKING_S,
        publish_s=config.training.publish_timeout_s,
    )
    say(f"weights go to the servers over {choice.plane}: {choice.why}")
    return plane


def check_publishing(config: RunConfig) -> None:
    """Raises if the plane that a run names cannot work here."""
    section, plane = config.inference, config.inference.publish_plane
    if section.backend != "vllm":
        return
    where = f'inference.publish_plane = "{plane}"'
    if plane in ("ipc", "nccl") and check_device(config.model).type != "cuda":
        raise ConfigError(
            f'{where} is for weights on a GPU, and the model is on the CPU: set "shared_memory" '
            'for servers on this machine, "http" for others, or leave it out'
        )
    if plane == "nccl" and server_shares_gpu(config, check_device(config.model)):
        raise ConfigError(
            f"{where}, but the server that this run starts is on the trainer's GPU, and NCCL "
            'refuses two processes on one: set "ipc", or leave it out'
        )
    if plane == "ipc" and launched().size > 1:
        raise ConfigError(
            f"{where} shares the memory of one GPU, and on {launched().size} ranks the weights are "
            'gathered on the CPU: set "shared_memory", or leave it out'
        )
    if section.publish_address is not None and (why := refusal_to_bind(section.publish_address)):
        listed = section.servers if isinstance(section.servers, list) else []
        reached = own_address((listed or ["http://127.0.0.1"])[0])
        raise ConfigError(
            f"inference.publish_address={section.publish_address!r} is not one of this machine's "
            f"addresses ({why}): try {reached!r}, or leave it out"
        )
    port, host = section.publish_port, section.publish_address or "127.0.0.1"
    if port is not None and launched().leads and (why := refusal_to_bind(host, port)):
        raise ConfigError(
            f"inference.publish_port={port} cannot be listened on ({why}): try {free_port()}, or "
            "leave it out"
        )
