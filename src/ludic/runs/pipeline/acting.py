"""An actor of a run: builds what the run file names, and no more. Imports torch only to sample
in-process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from ludic.distributed.deadlines import SLACK_S
from ludic.errors import ConfigError
from ludic.inference import VLLMChatClient
from ludic.inference.client import ChatClient
from ludic.inference.templates.plain_tokenizer import load_plain_tokenizer
from ludic.inference.tiny import tiny_tokenizer
from ludic.interaction import Runtime
from ludic.pipeline.actor import Accepts, ActorConfig, ActorReport, only, run_pipeline_actor
from ludic.runs import episodes
from ludic.runs.check_episodes import check_programs
from ludic.runs.interruption import handling, rare_collections
from ludic.runs.locate import read_run
from ludic.runs.pipeline.address import find_pipeline, section_of
from ludic.runs.pipeline.roster import Roster
from ludic.runs.settings import RunConfig
from ludic.runs.settings.base import read_key
from ludic.runs.settings.deadlines import newest_published_s, server_return_s
from ludic.runs.settings.paths import earlier_run
from ludic.runs.storage import RunFolder
from ludic.seeding import derive_seed
from ludic.workers.deadlines import ended


async def act_for(
    run: str,
    overrides: Sequence[str] = (),
    *,
    url: str | None = None,
    name: str | None = None,
    servers: Sequence[str] = (),
    tokenizer: str | None = None,
) -> ActorReport:
    """Works for a run (its folder, file or name) until it ends, or a signal says to stop."""
    config, modules, folder = read_run(run, overrides)
    episodes.import_user_modules(config, modules)
    pipeline = find_pipeline(config, folder.path if folder else None, url)
    check_programs(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(*_: object) -> None:
        loop.call_soon_threadsafe(stop.set)

    with handling(on_signal, signal.SIGINT, signal.SIGTERM):
        roster = None
        if config.inference.servers == "registered" and not servers:
            roster = Roster(config, folder.path if folder else None, url=url, published=True)
        async with AsyncExitStack() as stack:
            opened = _opened(config, list(servers), tokenizer, roster)
            runtime, follower = await stack.enter_async_context(opened)
            stack.enter_context(rare_collections())
            return await run_pipeline_actor(
                pipeline,
                episodes.rollout_engine(
                    config, runtime, seed=derive_seed(config.run.seed, "train")
                ),
                accepts=accepted(config),
                client=follower,
                cfg=ActorConfig(
                    concurrency=config.concurrency,
                    lease_s=section_of(config).lease_s,
                    name=name,
                    policy_address=section_of(config).policy_address,
                    policy_s=newest_published_s(config) + SLACK_S,
                ),
                stop=stop,
            )


def accepted(config: RunConfig) -> Accepts:
    """Accepts what the run's own environments and protocol are, and nothing else."""
    return only(request for request, _ in episodes.requests_of(config).values())


@asynccontextmanager
async def _opened(
    config: RunConfig, servers: list[str], tokenizer: str | None, roster: Roster | None
) -> AsyncIterator[tuple[Runtime, ChatClient | None]]:
    """What to play with, and the client that follows the trainer's policies, if it is ours."""
    if config.inference.backend == "local":
        from ludic.runs.playing import open_policy

        # The trainer's files have the adapter merged into the weights.
        plain = config.model.model_copy(update={"lora": None})
        config = config.model_copy(update={"model": plain})
        on_update = section_of(config).on_update
        async with open_policy(config, on_update=on_update) as opened:
            yield opened.runtime, opened.client
        return
    async with AsyncExitStack() as stack:
        addresses: Sequence[str] = servers or config.inference.servers
        key = read_key(config.inference, "inference")
        if roster is not None:
            stack.callback(roster.close)
            # A server has to start, and then to get weights.
            limit_s = server_return_s(config) + newest_published_s(config)
            addresses = await roster.wait(limit_s)
            key = roster.key
        if not addresses:
            raise ConfigError(
                "this run's vLLM server is started by its trainer: name it with --server, or list "
                "running ones in inference.servers"
            )
        named = load_plain_tokenizer(tokenizer) if tokenizer else _tokenizer_of(config)
        ours = episodes.with_template(config, named)
        model = "policy" if servers and not config.inference.servers else config.model.name
        # Weights that a server was started with are no trainer's: no version that there will be.
        client = VLLMChatClient(
            addresses,
            model=model,
            api_key=key,
            version=-1 if roster else 0,
            max_context_tokens=config.inference.max_context_tokens,
        )
        await stack.enter_async_context(client)
        await client.connect(tokenizer=ours)
        if roster is not None:
            await roster.update(client)
            following = asyncio.create_task(roster.follow(client))
            stack.push_async_callback(ended, following)
        others = {}
        if config.player:
            from ludic.runs.players.models import OtherPlayers

            players = OtherPlayers(config, ours)
            await stack.enter_async_context(players.opened())
            others = dict(players.runtimes)
        yield episodes.runtime_of(config, client, ours, others), None


def _tokenizer_of(config: RunConfig) -> Any:
    """The tokenizer of the run's model, however it is named."""
    name = config.model.name
    if name == "tiny":
        return tiny_tokenizer(words=config.model.kwargs.get("words", ()))
    if (earlier := earlier_run(name)) is not None:
        path, which = earlier
        return load_plain_tokenizer(str(RunFolder.open(path).weights(which)))
    return load_plain_tokenizer(name)
