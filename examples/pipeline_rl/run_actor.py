"""Sample for `run_trainer.py`, over Redis. Start as many as you like, on any machine that reaches
the Redis and the folder of the policies."""

from __future__ import annotations

import asyncio
import signal

from run_trainer import GAME, arguments, load  # type: ignore[import-not-found]

from ludic.inference import HFChatTemplate, InferenceSpec, LocalChatClient, SamplingConfig
from ludic.interaction import Runtime
from ludic.pipeline import ActorConfig, PipelineConfig, only, run_pipeline_actor
from ludic.rollouts import RolloutEngine


async def main() -> None:
    args = arguments()
    model, tokenizer = load(args.model)
    stop = asyncio.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    async with LocalChatClient(model, tokenizer, max_context_tokens=256) as client:
        sampling = InferenceSpec(SamplingConfig(temperature=1.0, max_tokens=8))
        runtime = Runtime(client, HFChatTemplate(tokenizer), args.model, sampling)
        report = await run_pipeline_actor(
            PipelineConfig(args.redis, args.run),
            RolloutEngine(runtime=runtime),
            accepts=only([GAME]),
            client=client,
            cfg=ActorConfig(concurrency=64),
            stop=stop,
        )
    print(f"{report.groups} groups, {report.tokens} tokens; left because {report.why}")


if __name__ == "__main__":
    asyncio.run(main())
