"""The run's tokens from vLLM: servers by address, or one that is started for the run."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from torch import nn

from ludic.distributed import (
    AdapterPolicyPublisher,
    BroadcastPolicyPublisher,
    ModelWeights,
    PolicyPublisher,
)
from ludic.distributed.vllm.canary import MismatchBudget
from ludic.errors import ConfigError
from ludic.inference import VLLMChatClient
from ludic.inference.client import ChatClient
from ludic.inference.vllm.server import ServerSettings, VLLMServer, free_port
from ludic.precision import sampling_dtype
from ludic.runs.model import precision_of
from ludic.runs.publishing import plane_of
from ludic.runs.results.terminal import say
from ludic.runs.settings import RunConfig
from ludic.runs.settings.servers import read_key
from ludic.sharding.ranks import launched
from ludic.sharding.weights import plain_name
from ludic.training.checkpoints.model_loading import no_progress_bar


async def open_vllm(
    config: RunConfig, model: nn.Module, tokenizer: Any, stack: AsyncExitStack, folder: Path | None
) -> tuple[ChatClient, PolicyPublisher]:
    """Returns a client and a publisher for the run's servers; `stack` ends what was started.

    Servers that were running already may have any weights: the model's are published to them
    first."""
    servers, name = config.inference.servers, config.model.name
    adapter = config.inference.publish_lora == "adapter"
    if adapter and config.model.lora is None:
        raise ConfigError(
            'inference.publish_lora = "adapter", but the model has no adapter: set [model.lora] '
            "with a rank, or leave publish_lora out"
        )
    if not servers:
        name = "policy"
        servers = [await _start(config, model, tokenizer, name, stack, folder)]
    key = read_key(config.inference, "inference")
    client = VLLMChatClient(servers, model=name, api_key=key)
    await stack.enter_async_context(client)
    await client.connect(tokenizer=tokenizer)
    publisher: PolicyPublisher
    if adapter:
        publisher = lent = AdapterPolicyPublisher(client)
        stack.push_async_callback(lent.close)
    else:
        budget = MismatchBudget.for_dtype(precision_of(config))
        device = next(model.parameters()).device
        plane = await plane_of(config, client, device, gathered=launched().size > 1)
        publisher = BroadcastPolicyPublisher(client, plane=plane, budget=budget)
    if adapter or config.inference.servers:
        await publisher.publish(ModelWeights(model), client.first_version)
    return client, publisher


async def _start(
    config: RunConfig,
    model: nn.Module,
    tokenizer: Any,
    name: str,
    stack: AsyncExitStack,
    folder: Path | None,
) -> str:
    """Saves the model where the server can read it, waits until the server is healthy, and returns
    its address. What ends it is on `stack` before it begins, since any wait may be cancelled."""
    own = tempfile.TemporaryDirectory(prefix="ludic-vllm-", ignore_cleanup_errors=True)
    temporary = Path(stack.enter_context(own))
    where = temporary if folder is None else folder / "vllm"
    where.mkdir(parents=True, exist_ok=True)
    adapter = config.inference.publish_lora == "adapter"
    lora, vllm = config.model.lora, config.inference.vllm
    settings = ServerSettings(
        model=str(where),
        served_name=name,
        port=free_port(),
        dtype=str(sampling_dtype(precision_of(config))).removeprefix("torch."),
        max_model_len=config.inference.max_context_tokens,
        max_num_seqs=config.inference.slots,
        max_lora_rank=lora.rank if adapter and lora is not None else None,
        gpu_memory_utilization=vllm.gpu_memory,
        eager=vllm.eager,
        kv_cache_gib=vllm.kv_cache_gib,
        extra=vllm.arguments(),
    )
    server = VLLMServer(
        settings,
        python=config.inference.vllm_python,
        log=where / "server.log",
        folder=temporary,
    )
    stack.callback(server.stop)

    def save() -> None:
        with no_progress_bar():
            save_for_vllm(model, where, merged=not adapter)
        tokenizer.save_pretrained(where)

    say("starting a vLLM server for this run; that takes a minute")
    saving = asyncio.create_task(asyncio.to_thread(save))
    stack.push_async_callback(asyncio.wait, {saving})  # a thread goes on when it is cancelled
    await asyncio.shield(saving)
    server.start()
    await asyncio.to_thread(server.wait_until_healthy)
    return server.url


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
