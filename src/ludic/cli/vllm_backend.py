"""The run's tokens from vLLM: servers by address, or one that is started for the run."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from torch import nn

from ludic.cli.run_file import RunConfig
from ludic.cli.show import say
from ludic.distributed import PolicyPublisher
from ludic.distributed.publisher import BroadcastPolicyPublisher
from ludic.inference import VLLMChatClient
from ludic.inference.client import ChatClient
from ludic.inference.vllm_server import ServerSettings, VLLMServer, free_port


async def open_vllm(
    config: RunConfig, model: nn.Module, tokenizer: Any, stack: AsyncExitStack, folder: Path | None
) -> tuple[ChatClient, PolicyPublisher]:
    """A client of the run's servers and a publisher to them; what was started ends with `stack`."""
    servers, name = config.inference.servers, config.model.name
    if not servers:
        name = "policy"
        server = await asyncio.to_thread(_start, config, model, tokenizer, name, folder)
        stack.callback(server.stop)
        servers = [server.url]
    client = VLLMChatClient(servers, model=name)
    await stack.enter_async_context(client)
    await client.connect(tokenizer=tokenizer)
    return client, BroadcastPolicyPublisher(client)


def _start(
    config: RunConfig, model: nn.Module, tokenizer: Any, name: str, folder: Path | None
) -> VLLMServer:
    """Saves the model where the server can read it, and waits until the server is healthy."""
    where = Path(tempfile.mkdtemp(prefix="ludic-vllm-")) if folder is None else folder / "vllm"
    where.mkdir(parents=True, exist_ok=True)
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    base.save_pretrained(where)
    tokenizer.save_pretrained(where)
    settings = ServerSettings(
        model=str(where),
        served_name=name,
        port=free_port(),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        max_model_len=config.inference.max_context_tokens,
        max_num_seqs=config.inference.slots,
    )
    say("starting a vLLM server for this run; that takes a minute")
    return VLLMServer(settings, python=config.inference.vllm_python).__enter__()
