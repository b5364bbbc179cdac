"""A run's algorithms, filters and trainers, made from its configuration."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

from ludic.errors import ConfigError
from ludic.registry import CORRECTIONS, FILTERS
from ludic.runs.model import configuring, precision_of
from ludic.runs.settings import RunConfig
from ludic.saw.credit import CreditAssigner
from ludic.saw.filters import SampleFilter, combine
from ludic.seeding import derive_seed
from ludic.training import CheckpointConfig, RLAlgorithm, TrainerConfig, make_algorithm
from ludic.training.credit_assignment.returns import (
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    SummaryCredit,
)
from ludic.training.losses.corrections import CorrectedLoss
from ludic.training.preprocess import KLInReward, chain


def algorithm_of(config: RunConfig) -> RLAlgorithm:
    """Returns the run's algorithm; arguments that it does not take are a `ConfigError`. If the run
    keeps groups that lost a member, the algorithm compares the members that are left."""
    section, reference = config.algorithm, config.reference
    with configuring(f"algorithm {section.name!r} with {section.kwargs}"):
        algorithm = make_algorithm(section.name, **section.kwargs)
    if section.summaries != "advantage":
        algorithm = replace(
            algorithm, credit_assigner=_with_summaries(algorithm, section.summaries)
        )
    if section.corrections:
        with configuring("algorithm.corrections"):
            corrections = [CORRECTIONS.make_from(table) for table in section.corrections]
        algorithm = replace(algorithm, loss=CorrectedLoss(algorithm.loss, *corrections))
    if reference is not None and reference.kl_in_reward:
        charge = KLInReward(reference.kl_in_reward, reference.horizon)
        algorithm = replace(algorithm, preprocess=chain(algorithm.preprocess, charge))
    keep = config.training.lost_member == "keep_partial"
    return algorithm.with_partial_groups() if keep else algorithm


def _with_summaries(algorithm: RLAlgorithm, summaries: SummaryCredit) -> CreditAssigner:
    credit = algorithm.credit_assigner
    if not isinstance(credit, GroupNormalizedReturn | HybridNormalizedReturn):
        raise ConfigError(
            f"algorithm.summaries={summaries!r} is for algorithms that compare groups, and "
            f"{algorithm.name!r} does not: to leave summaries out of training, set "
            'training.filters = ["drop_compactions"]'
        )
    return replace(credit, summaries=summaries)


def sft_algorithm(config: RunConfig) -> RLAlgorithm:
    """Returns what the cold start learns by."""
    assert config.sft is not None
    with configuring(f"sft.aggregation={config.sft.aggregation!r}"):
        return make_algorithm("sft", aggregation=config.sft.aggregation)


def sample_filter_of(config: RunConfig) -> SampleFilter | None:
    """Returns the run's filters as one, if it has any. A function by its place is the filter
    itself; a name, or a table with arguments, is what makes one."""
    filters: list[SampleFilter] = []
    for entry in config.training.filters:
        with configuring(f"training.filters: {entry!r}"):
            if isinstance(entry, str) and entry not in FILTERS.names():
                filters.append(FILTERS.get(entry))
            else:
                filters.append(FILTERS.make_from(entry))
    return combine(*filters) if filters else None


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
