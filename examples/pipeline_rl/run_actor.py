"""Sample for `run_trainer.py`, over Redis. Start as many as you like, on any machine that reaches
the Redis and the folder of the policies, or the vLLM server (--port)."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

from run_trainer import (  # type: ignore[import-not-found]
    GAME,
    arguments,
    load_model,
    load_tokenizer,
    redis_url,
    server,
)

from ludic.inference import HFChatTemplate, InferenceSpec, LocalChatClient, SamplingConfig
from ludic.inference.client import ChatClient
from ludic.interaction import Runtime
from ludic.pipeline import ActorConfig, PipelineConfig, only, run_pipeline_actor
from ludic.rollouts import RolloutEngine


async def main() -> None:
    args = arguments()
    tokenizer = load_tokenizer(args.model)
    stop = asyncio.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    async with AsyncExitStack() as stack:
        client: ChatClient
        follows = None  # the client that takes new weights from the trainer's files
        if args.port:  # the trainer sends them to the server itself
            client = await server(args, tokenizer, stack)
        else:
            local = LocalChatClient(load_model(args.model), tokenizer, max_context_tokens=256)
            client = follows = await stack.enter_async_context(local)
        sampling = InferenceSpec(SamplingConfig(temperature=1.0, max_tokens=8))
        runtime = Runtime(client, HFChatTemplate(tokenizer), args.model, sampling)
        report = await run_pipeline_actor(
            PipelineConfig(redis_url(), args.run),
            RolloutEngine(runtime=runtime),
            accepts=only([GAME]),
            client=follows,
            cfg=ActorConfig(concurrency=64),
            stop=stop,
        )
    print(f"{report.groups} groups, {report.tokens} tokens; left because {report.why}")


if __name__ == "__main__":
    asyncio.run(main())
