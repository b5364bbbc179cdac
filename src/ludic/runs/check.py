"""Finds what is wrong with a run before its folder is made or a step is trained."""

from __future__ import annotations

import os
from pathlib import Path

from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_tokenizer
from ludic.registry import LOGGERS
from ludic.runs.check_episodes import check_episodes
from ludic.runs.episodes import inference_spec, requests_of, with_template
from ludic.runs.memory import check_memory
from ludic.runs.model import (
    algorithm_of,
    build_model,
    check_device,
    sample_filter_of,
    sft_algorithm,
    trainer_config,
)
from ludic.runs.players.scoring import check_scoring
from ludic.runs.players.seating import check_seating
from ludic.runs.players.teacher import load_teacher
from ludic.runs.ranks import check_ranks
from ludic.runs.settings import RunConfig
from ludic.runs.settings.base import read_key
from ludic.runs.settings.from_python import given_names
from ludic.runs.settings.run import SFTSection
from ludic.runs.vllm_backend import check_publishing
from ludic.training import RLAlgorithm
from ludic.training.credit_assignment.value_tracker import TrackedAdvantage


def check_parts(config: RunConfig) -> None:
    """Raises if a part of the run is missing, does not fit, or could never train."""
    check_device(config.model)
    check_memory(config)
    with_template(config, tiny_tokenizer())  # raises if the file cannot be read
    check_ranks(config)
    if config.pipeline is not None:
        from ludic.runs.pipeline.address import check_pipeline  # which needs the extra `redis`

        check_pipeline(config)
    if config.cluster is not None and not config.training.resumable:
        raise ConfigError(
            "training.resumable=false cannot be used with [cluster]: a trainer that is restarted "
            "resumes from its last checkpoint"
        )
    _check_workers(config)
    if config.model.name == "tiny":  # any other takes too long to load twice
        build_model(config)
    for logger in config.logging.loggers:
        LOGGERS.maker(logger)  # raises if there is none of that name
    algorithm = algorithm_of(config)
    credit = algorithm.credit_assigner
    tracked = credit if config.training.steps and isinstance(credit, TrackedAdvantage) else None
    check_episodes(config, tracked)
    check_seating(config, algorithm)
    if config.sft is not None:
        _check_sft(config, config.sft)
    _check_sampling(config)
    check_publishing(config)
    if config.training.steps:
        _check_training(config)
        _check_algorithm(config, algorithm)
    elif config.sft is None or not config.sft.steps:
        raise ConfigError(
            "this run trains nothing: set training.steps or sft.steps above 0; `ludic eval` "
            "measures a model as it is"
        )


def _check_workers(config: RunConfig) -> None:
    """Raises if episodes are to be played in processes that cannot have what they are made of."""
    played = {"env": config.plain()["env"], "protocol": config.plain()["protocol"]}
    if config.training.workers and (given := given_names(played)):
        raise ConfigError(
            f"training.workers={config.training.workers}: episodes are played in other processes, "
            f"and {', '.join(given)} is an object of this script: put it into a module, or leave "
            "training.workers out"
        )


def _check_sft(config: RunConfig, sft: SFTSection) -> None:
    sft_algorithm(config)
    if sft.teacher is not None:
        load_teacher(sft.teacher)
    elif not os.path.isfile(sft.data or ""):
        raise ConfigError(f"sft.data={sft.data!r}: there is no such file")
    if sft.steps:
        trainer_config(config, "sft", Path())


def _check_sampling(config: RunConfig) -> None:
    read_key(config.inference, "inference")
    sampling, backend = config.inference.sampling, config.inference.backend
    taught = config.sft is not None and config.sft.teacher is not None
    if sampling.temperature == 0 and (taught or config.training.steps):
        raise ConfigError(
            "inference.sampling.temperature=0 always gives the same answer, so nothing can be "
            "learned: set it above 0; for greedy evaluation set eval.temperature=0"
        )
    reported = backend == "local" or (config.inference.servers and sampling.top_k)
    if config.training.steps and inference_spec(config).returns.kept_ids and not reported:
        raise ConfigError(
            "inference.sampling with top_p, top_k or min_p can be trained on with vLLM only if the "
            "server reports which tokens it kept: set top_k above 0 and name servers that were "
            "started with --return-sampling-mask in inference.servers, or leave all three out"
        )


def _check_training(config: RunConfig) -> None:
    training = config.training
    if training.schedule != "constant" and training.warmup_steps >= training.steps:
        raise ConfigError(
            f"training.warmup_steps={training.warmup_steps} leaves nothing of training.steps="
            f"{training.steps} for the {training.schedule} schedule: warm up for fewer steps"
        )
    trainer_config(config, "rl", Path())


def _check_algorithm(config: RunConfig, algorithm: RLAlgorithm) -> None:
    algorithm.check_rollouts_per_update(config.training.rollouts_per_update)
    if config.training.dynamic_sampling and (algorithm.group_size or 1) == 1:
        raise ConfigError(
            f"training.dynamic_sampling is for an algorithm that compares groups, and "
            f"{config.algorithm.name!r} does not: leave it out, or choose one such as 'grpo'"
        )
    sample_filter_of(config)
    check_scoring(config, algorithm, list(requests_of(config)))
