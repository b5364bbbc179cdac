"""A run's model and tokenizer, created or loaded, with an adapter if asked, on its device; and what
trains it: algorithm, filters, the trainer's settings."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.inference import LocalChatClient
from ludic.plumbing.arguments import unknown_argument
from ludic.plumbing.given import given, is_given
from ludic.plumbing.precision import Precision, default_precision, weights_dtype
from ludic.registry import CORRECTIONS, FILTERS
from ludic.runs.episodes import with_template
from ludic.runs.pretrained import from_pretrained, load_tokenizer, load_weights, with_adapter
from ludic.runs.settings import ModelSection, RunConfig
from ludic.runs.settings.base import configuring
from ludic.runs.settings.paths import earlier_run
from ludic.runs.storage import RunFolder
from ludic.saw.filters import SampleFilter, combine
from ludic.seeding import derive_seed
from ludic.training import CheckpointConfig, RLAlgorithm, TrainerConfig, make_algorithm
from ludic.training.credit_assignment.returns import GroupNormalizedReturn, HybridNormalizedReturn
from ludic.training.losses.corrections import CorrectedLoss
from ludic.training.preprocess import KLInReward, chain

OnUpdate: TypeAlias = Literal["finish", "continue"]
"""What becomes of completions under way when new weights come."""


def build_model(
    config: RunConfig, weights: Path | None = None, *, inside: bool = False
) -> tuple[nn.Module, Any]:
    """Returns the run's model and tokenizer; `weights` is the `model` folder of a checkpoint. One
    that is `inside` another run leaves the process's settings alone."""
    if config.run.threads is not None and not inside:
        torch.set_num_threads(config.run.threads)
    section, dtype = config.model, weights_dtype(precision_of(config))
    if config.inference.backend == "local" and not inside:
        _let_memory_grow(section)
    if is_given(section.name):
        model, tokenizer = given(section.name, "model")
    elif section.name == "tiny":
        model, tokenizer = _tiny(section, derive_seed(config.run.seed, "model"), dtype)
    elif (earlier := earlier_run(section.name)) is not None:
        model, tokenizer = _from_run(section, dtype, *earlier)
    else:
        model, tokenizer = from_pretrained(section, section.name, dtype)
    tokenizer = with_template(config, tokenizer)
    if section.lora is not None:
        model = with_adapter(model, section, derive_seed(config.run.seed, "lora"))
    if weights is not None:
        load_weights(model, weights)
    if is_given(section.name) and section.device is None:
        return model, tokenizer  # it stays where the script put it
    return model.to(check_device(section)), tokenizer


def _let_memory_grow(section: ModelSection) -> None:
    """Lets torch's allocator extend what it holds instead of taking another block: trainer and
    engine take turns in it, and of blocks cut for the one, half are no use to the other. Memory of
    this kind cannot be lent to a server's process, so this is for engines of ours, and unless the
    user has settings of their own."""
    is_set = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if not is_set and check_device(section).type == "cuda":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def precision_of(config: RunConfig) -> Precision:
    """Returns what trainer and engine compute in: as the run says, or as its device suggests. A
    loaded model that a script gave is taken as it is."""
    section = config.model
    if stated := section.precision or section.dtype:
        return stated
    if is_given(section.name):
        weights = next(given(section.name, "model")[0].parameters())
        return "bfloat16" if weights.dtype == torch.bfloat16 else "float32"
    return default_precision(check_device(section).type)


def _tiny(section: ModelSection, seed: int, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    from ludic.inference.tiny import tiny_model, tiny_tokenizer

    options = dict(section.kwargs)
    names = [*signature(tiny_model).parameters, "words"]
    names = [name for name in names if name not in ("seed", "vocab_size")]
    if unknown := [name for name in options if name not in names]:
        raise ConfigError(f"model.kwargs of the tiny model: {unknown_argument(unknown[0], names)}")
    try:
        tokenizer = tiny_tokenizer(words=options.pop("words", ()))
        model = tiny_model(seed, vocab_size=len(tokenizer), **options)
        return model.to(dtype), tokenizer
    except Exception as exc:  # of many kinds, but about these arguments: there are no others
        raise ConfigError(f"model.kwargs does not fit the tiny model: {exc}") from exc


def _from_run(
    section: ModelSection, dtype: torch.dtype, path: Path, which: str | None
) -> tuple[nn.Module, Any]:
    """The model of another run's checkpoint. An adapter is merged into what it was trained on."""
    folder = RunFolder.open(path)
    weights = folder.weights(which)
    if (weights / "config.json").is_file() and (weights / "tokenizer_config.json").is_file():
        return from_pretrained(section, str(weights), dtype)
    model, tokenizer = build_model(folder.config(), weights, inside=True)
    merge: Any = getattr(model, "merge_and_unload", None)
    return (merge() if merge else model).to(dtype), tokenizer


def tokenizer_of(config: RunConfig) -> Any:
    """Returns the run's tokenizer without loading the model, if that is possible."""
    name = config.model.name
    if name == "tiny" or is_given(name) or earlier_run(name) is not None:
        return build_model(config)[1]
    return with_template(config, load_tokenizer(name, "model"))


def check_device(section: ModelSection) -> torch.device:
    """Returns the device to put the model on; raises if this machine does not have it."""
    name = section.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"model.device={name!r} is not a device that torch knows") from exc
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device={name!r}: a run trains on cpu or cuda, set one of them")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"model.device={name!r}, but this machine has {count or 'no'} GPU that torch can use: "
            "set model.device=cpu" + (f" or below cuda:{count}" if count else "")
        )
    return device


def local_client(
    config: RunConfig, model: nn.Module, tokenizer: Any, on_update: OnUpdate = "finish"
) -> LocalChatClient:
    """Returns an engine in this process that samples from `model` itself."""
    return LocalChatClient(
        model,
        tokenizer,
        max_slots=config.slots,
        max_context_tokens=config.inference.max_context_tokens,
        deterministic=config.inference.deterministic,
        on_update=on_update,
        precision=precision_of(config),
    )


def algorithm_of(config: RunConfig) -> RLAlgorithm:
    """Returns the run's algorithm; arguments that it does not take are a `ConfigError`. If the run
    keeps groups that lost a member, the algorithm compares the members that are left."""
    section, reference = config.algorithm, config.reference
    with configuring(f"algorithm {section.name!r} with {section.kwargs}"):
        algorithm = make_algorithm(section.name, **section.kwargs)
    if section.summaries != "advantage":
        credit = algorithm.credit_assigner
        if not isinstance(credit, GroupNormalizedReturn | HybridNormalizedReturn):
            raise ConfigError(
                f"algorithm.summaries={section.summaries!r} is for algorithms that compare groups, "
                f"and {algorithm.name!r} does not: to leave summaries out of training, set "
                'training.filters = ["drop_compactions"]'
            )
        credit = replace(credit, summaries=section.summaries)
        algorithm = replace(algorithm, credit_assigner=credit)
    if section.corrections:
        with configuring("algorithm.corrections"):
            corrections = [CORRECTIONS.make_from(table) for table in section.corrections]
        algorithm = replace(algorithm, loss=CorrectedLoss(algorithm.loss, *corrections))
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
            resumable=training.resumable,
            background=True,
        ),
        run_dir=folder if stage == "rl" else folder / stage,
        eval_every=config.eval.every or None,
    )
