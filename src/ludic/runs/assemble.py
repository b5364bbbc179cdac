"""Builds the library's objects from a run's configuration, as a script would by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ludic.agents.mcp import tool_servers
from ludic.distributed import PolicyPublisher
from ludic.distributed.local import LocalPolicyPublisher
from ludic.inference.client import ChatClient
from ludic.interaction import Runtime
from ludic.plumbing.precision import float32_products
from ludic.registry import CORRECTIONS, FILTERS
from ludic.runs.episodes import inference_spec, runtime_of
from ludic.runs.model import build_model, configuring, local_client, precision_of
from ludic.runs.players.seats import OtherPlayers
from ludic.runs.settings import RunConfig
from ludic.saw.filters import SampleFilter, combine
from ludic.seeding import derive_seed
from ludic.training import CheckpointConfig, RLAlgorithm, TrainerConfig, make_algorithm
from ludic.training.losses.corrections import CorrectedLoss
from ludic.training.preprocess import KLInReward, chain


@dataclass(frozen=True)
class OpenPolicy:
    """A run's model, with a client to sample from it and a publisher to train it through."""

    model: nn.Module
    tokenizer: Any
    runtime: Runtime
    publisher: PolicyPublisher | None


@asynccontextmanager
async def open_policy(
    config: RunConfig, *, weights: Path | None = None, folder: Path | None = None
) -> AsyncIterator[OpenPolicy]:
    """Opens model, client and publisher, and closes them at the end. If a vLLM server has to be
    started, the model is saved for it in `folder`."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    model, tokenizer = build_model(config, weights)
    async with AsyncExitStack() as stack:
        # Once for the whole run: its trainer and its engine, in their threads, ask for the same.
        stack.enter_context(float32_products(precision_of(config)))
        await stack.enter_async_context(tool_servers())
        client: ChatClient
        publisher: PolicyPublisher
        if config.inference.backend == "local":
            client = local = await stack.enter_async_context(local_client(config, model, tokenizer))
            publisher = LocalPolicyPublisher(local)
        else:
            from ludic.runs.vllm_backend import open_vllm

            client, publisher = await open_vllm(config, model, tokenizer, stack, folder)
        players = OtherPlayers(config, tokenizer, inference_spec(config, trained_on=False))
        await stack.enter_async_context(players)
        runtime = runtime_of(config, client, tokenizer, players.runtimes)
        yield OpenPolicy(model, tokenizer, runtime, publisher)


def algorithm_of(config: RunConfig) -> RLAlgorithm:
    """Returns the run's algorithm; arguments that it does not take are a `ConfigError`. If the run
    keeps groups that lost a member, the algorithm compares the members that are left."""
    section, reference = config.algorithm, config.reference
    with configuring(f"algorithm {section.name!r} with {section.kwargs}"):
        algorithm = make_algorithm(section.name, **section.kwargs)
    if section.corrections:
        with configuring("algorithm.corrections"):
            found = [CORRECTIONS.make_from(correction) for correction in section.corrections]
        algorithm = replace(algorithm, loss=CorrectedLoss(algorithm.loss, *found))
    if reference is not None and reference.kl_in_reward:
        charge = KLInReward(reference.kl_in_reward, reference.horizon)
        algorithm = replace(algorithm, preprocess=chain(algorithm.preprocess, charge))
    keep = config.training.lost_member == "keep_partial"
    return algorithm.with_partial_groups() if keep else algorithm


def sft_algorithm(config: RunConfig) -> RLAlgorithm:
    """Returns what the cold start learns by."""
    assert config.sft is not None
    with configuring(f"sft.aggregation={config.sft.aggregation!r}"):
        return make_algorithm("sft", aggregation=config.sft.aggregation)


def sample_filter_of(config: RunConfig) -> SampleFilter | None:
    """Returns the run's filters as one, if it has any. A function by its place is the filter
    itself; a name, or a table with arguments, is what makes one."""
    found: list[SampleFilter] = []
    for entry in config.training.filters:
        with configuring(f"training.filters: {entry!r}"):
            if isinstance(entry, str) and entry not in FILTERS.names():
                found.append(FILTERS.get(entry))
            else:
                found.append(FILTERS.make_from(entry))
    return combine(*found) if found else None


def trainer_config(config: RunConfig, stage: Literal["sft", "rl"], folder: Path) -> TrainerConfig:
    """Returns how a stage is trained; `folder` is the run's. The supervised stage uses each batch
    once, with a learning rate that decays to a tenth."""
    training, steps = config.training, config.training.steps
    shared = {field.name for field in fields(TrainerConfig)} & type(training).model_fields.keys()
    settings = training.model_dump(include=shared)
    if stage == "sft":
        assert config.sft is not None
        steps = config.sft.steps
        settings |= {"learning_rate": config.sft.learning_rate, "schedule": "linear"}
        settings |= {"final_lr_ratio": 0.1, "warmup_steps": 0}
        settings |= {"epochs": 1, "mini_batches": 1, "overlap": False}
    return TrainerConfig(
        **settings,
        precision=precision_of(config),
        total_steps=steps if settings["schedule"] != "constant" else None,
        seed=derive_seed(config.run.seed, stage),
        checkpoint=CheckpointConfig(
            folder / "checkpoints" / stage,
            every=training.checkpoint_every or max(steps, 1),
            keep=training.keep_checkpoints,
            background=True,
        ),
        run_dir=folder if stage == "rl" else folder / stage,
        eval_every=config.eval.every or None,
    )
