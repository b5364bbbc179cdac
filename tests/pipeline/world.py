"""A run over Redis that is small and the same every time: a guessing game, a client whose replies
follow from the seeds alone, and a tiny model that learns from them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from ludic.inference.scripted_client import ScriptedCall, ScriptedChatClient
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.interaction.base import Runtime
from ludic.pipeline import (
    ActorConfig,
    ActorReport,
    Bounds,
    PipelineBatchSource,
    PipelineConfig,
    PipelinePublisher,
    TrainerLease,
    only,
    run_pipeline_actor,
)
from ludic.pipeline.store import Store
from ludic.rollouts import EnvSpec, FixedMix, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.seeding import derive_seed
from ludic.training import CheckpointConfig, Trainer, TrainerConfig, make_grpo
from tests.rollouts.worlds import GuessEnv

ENVS: dict[str, Callable[..., Any]] = {"guess": GuessEnv}
REQUEST = RolloutRequest(
    EnvSpec("guess", {"tries": 2}), ProtocolSpec("single_agent", {"parser": "text"})
)
GROUP_SIZE = 4


def seeded_reply(call: ScriptedCall) -> str:
    """A digit that depends on the request's seed, and on nothing else."""
    return str(derive_seed(call.request.sampling.seed or 0, "reply") % 4)


def make_client(latency_s: float = 0.0) -> tuple[ScriptedChatClient, HFChatTemplate]:
    template = HFChatTemplate(tiny_tokenizer())
    client = ScriptedChatClient(seeded_reply, template, logprob=-1.5, latency_s=latency_s)
    return client, template


def make_engine(latency_s: float = 0.0) -> tuple[RolloutEngine, ScriptedChatClient]:
    client, template = make_client(latency_s)
    return RolloutEngine(ENVS, runtime=Runtime(client, template, "scripted"), seed=7), client


def make_curriculum() -> FixedMix:
    return FixedMix({"guess": (REQUEST, 1.0)}, seed=3)


def server_of(store: Store) -> Any:
    """The Redis of a store, past the run's own scripts."""
    return redis.Redis.from_url(store.config.url)


def make_source(
    config: PipelineConfig,
    *,
    groups_per_update: int = 2,
    every: int = 2,
    lease_s: float = 2.0,
    kind: type[PipelineBatchSource] = PipelineBatchSource,
    bounds: Bounds | None = None,
    **options: Any,
) -> PipelineBatchSource:
    bounds = bounds or Bounds()
    return kind(
        lease=TrainerLease(config, lease_s=lease_s, fingerprint="world", max_bytes=bounds.bytes),
        request_fn=make_curriculum(),
        algorithm=make_grpo(group_size=GROUP_SIZE),
        rollouts_per_update=groups_per_update * GROUP_SIZE,
        checkpoint_every=every,
        max_steps=2,
        bounds=bounds,
        **{"wait_s": 60.0, **options},
    )


def make_trainer(
    source: PipelineBatchSource, folder: Path | None = None, *, every: int = 2, **checkpoint: Any
) -> Trainer:
    saved = CheckpointConfig(folder, every=every, **checkpoint) if folder else None
    return Trainer(
        model=tiny_model(),
        batch_source=source,
        publisher=PipelinePublisher(source.lease),
        cfg=TrainerConfig(
            learning_rate=1e-3,
            max_seq_len=512,
            checkpoint=saved,
            run_dir=folder.with_name(f"{folder.name}-metrics") if folder else None,
        ),
    )


async def act(
    config: PipelineConfig,
    *,
    name: str | None = None,
    latency_s: float = 0.0,
    lease_s: float = 2.0,
    concurrency: int = 16,
    stop: asyncio.Event | None = None,
    **options: Any,
) -> ActorReport:
    """One actor of this world."""
    engine, client = make_engine(latency_s)
    return await run_pipeline_actor(
        config,
        options.pop("engine", engine),
        accepts=options.pop("accepts", only([REQUEST])),
        client=options.pop("client", client),
        cfg=ActorConfig(concurrency=concurrency, lease_s=lease_s, name=name, **options),
        stop=stop,
    )


class Recorded(PipelineBatchSource):
    """Writes down which units went into which batch, when it hands the batch over."""

    record: Path

    async def _collect(self) -> list[int]:
        self._numbers = await super()._collect()
        return self._numbers

    async def next_batch(self) -> Any:
        batch = await super().next_batch()
        self._note()
        return batch

    async def _ask(self, numbers: Iterable[int], again: bool = False) -> None:
        asked = list(numbers)
        for number in asked:
            self._write({"asked": number, "of": self.ledger.outstanding[number].of})
        await super()._ask(asked, again)

    def _note(self) -> None:
        self._write({"step": self.step, "units": self._numbers, "attempt": self.lease.attempt})

    def _write(self, line: dict[str, Any]) -> None:
        with open(self.record, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def recorded(record: Path) -> Iterator[dict[str, Any]]:
    """The lines of a record."""
    for line in record.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # a kill cut it, so that it did not happen either
            yield json.loads(line)


def trained_units(record: Path) -> dict[int, list[int]]:
    """The units of every update, by its number. What a resumed trainer does again counts once: as
    it did it last."""
    return {entry["step"]: entry["units"] for entry in recorded(record) if "step" in entry}
