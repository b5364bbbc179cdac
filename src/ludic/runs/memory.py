"""Whether a run fits its device: told from its settings before a model is loaded, then from the
model itself, and at last by one real pass before the first episode is played. And what trainer
and sampler take of one GPU, and leave for each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch import nn

from ludic.errors import ConfigError, OutOfMemoryError
from ludic.inference.vllm.memory import ServerNeed, server_need, share_beside_trainer
from ludic.memory.engine import default_context
from ludic.memory.plan import Engine, Plan, remedies, settled, with_logits
from ludic.memory.shape import PLAIN_FAMILIES, Adapter, ModelShape
from ludic.memory.update import Training
from ludic.plumbing.given import is_given
from ludic.plumbing.model_parts import config_facts
from ludic.plumbing.precision import sampling_dtype
from ludic.runs.locate import locate
from ludic.runs.model import algorithm_of, build_model, check_device, precision_of
from ludic.runs.players.models import as_model
from ludic.runs.players.scoring import start_is_below_adapter
from ludic.runs.ranks import samples
from ludic.runs.settings import ModelSection, OtherModelSection, RunConfig
from ludic.runs.settings.paths import earlier_run
from ludic.sharding.ranks import launched
from ludic.sharding.world import World
from ludic.training import TrainerConfig
from ludic.training.update.budget import (
    USUAL,
    as_planned,
    free_memory,
    host_memory,
    shape_of,
    trainer_bytes,
)
from ludic.training.update.calibrate import Calibration, calibrate, trial_pass

SERVER = "vLLM server"
_CPU_SLOTS = 8
"""Slots that an engine on a CPU begins with; it makes more as they are needed."""


def check_memory(config: RunConfig, free: int | None = None) -> None:
    """Raises `OutOfMemoryError` if the configuration of the run's model alone tells that training
    it cannot fit into `free` bytes (None: what the device has), and `ConfigError` if the context is
    longer than the model's. Says nothing of models that are not here, or are of other families."""
    shape = shape_by_name(config.model)
    if shape is None:
        return
    device = check_device(config.model)
    if free is None:
        free = free_memory(device) if device.type == "cuda" else host_memory()
    _plan_that_fits(config, shape, device, free)


def plan_loaded(config: RunConfig, model: nn.Module) -> Plan | None:
    """The same for a model of any family, once it is loaded and before there is an engine. Returns
    the plan of a run in one process; None on several ranks, whose trainers plan together."""
    device, shape = next(model.parameters()).device, shape_of(model)
    if shape is None or launched().size > 1:
        return None
    free = free_memory(device) + _weight_bytes(model) if device.type == "cuda" else host_memory()
    return _plan_that_fits(config, shape, device, free)


def try_plan(config: RunConfig, model: nn.Module, plan: Plan) -> None:
    """Tries one pass over the largest micro-batch on a GPU, beside the engine. Nothing changes."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return
    free = free_memory(device) + plan.parts["weights"]
    try:
        cfg = planned(trainer_settings(config), plan)
        trial_pass(model, algorithm_of(config).loss, cfg, World(device=device))
    except (OutOfMemoryError, torch.OutOfMemoryError) as exc:
        raise _refused(config, plan, free, "a pass was tried and does not fit") from exc


def snapshots_fit(plan: Plan, model: nn.Module) -> bool:
    """Whether the GPU has room for two copies of the weights, which are published from one while
    the other is made. A server of the run's own has taken its part by now."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return False
    size = _weight_bytes(model)
    others = {name: size for name, size in plan.others.items() if name != SERVER}
    plan = replace(plan, others=others | {"snapshots": 2 * size})
    return plan.fits(free_memory(device) + size)


def planned(cfg: TrainerConfig, plan: Plan | None) -> TrainerConfig:
    """A trainer's settings as a plan on a GPU settles them; on a CPU, and without a plan, the
    trainer does that by itself."""
    if plan is None or plan.training.device != "cuda":
        return cfg
    return as_planned(cfg, plan)


def shape_by_name(model: ModelSection) -> ModelShape | None:
    """How large a model is that has not been loaded; None if its configuration is not in a folder
    and was not downloaded earlier, or it is of another family."""
    facts = _facts(model)
    return ModelShape.of(facts) if facts.get("model_type") in PLAIN_FAMILIES else None


def _facts(model: ModelSection) -> dict[str, Any]:
    name = model.name
    if name in ("tiny", "start") or is_given(name) or earlier_run(name) is not None:
        return {}
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoConfig

    folder = Path(name)
    if not (folder / "config.json").is_file():
        with suppress(ValueError):  # it is no name, which loading says best
            cached = try_to_load_from_cache(name, "config.json", revision=model.revision)
            if isinstance(cached, str):
                folder = Path(cached).parent
    try:
        whole = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError):
        return {}
    facts: dict[str, Any] = whole.get_text_config().to_dict()
    return facts | model.kwargs


def plan_run(config: RunConfig, shape: ModelShape, device: torch.device, free: int) -> Plan:
    """What the run takes of its device, with what it leaves open settled for `free` bytes."""
    training, lora = config.training, config.model.lora
    on_gpu, ranks = device.type == "cuda", launched().size
    adapter = None
    if lora is not None:
        targets = lora.target_modules
        adapter = Adapter(lora.rank, targets if isinstance(targets, str) else tuple(targets))
    how = Training(
        tokens=training.max_seq_len,
        precision=precision_of(config),
        device="cuda" if on_gpu else "cpu",
        adapter=adapter,
        optimizer_device=training.optimizer_device or "cuda",
        fused_layers=training.fused_layers and not training.compile,
        whole_logits=algorithm_of(config).loss.needs_logits,
        ranks=ranks,
    )
    others: dict[str, int] = {}
    if server_shares_gpu(config, device):
        need = need_of_server(config, shape)
        others[SERVER] = need.least if need else 0
    plan = Plan(shape, how, _engine(config, shape, on_gpu))
    others |= _other_models(config, plan, device)
    if copies := training.past_opponents:
        sampling = plan.engine_memory(plan.engine).total if plan.engine else 0
        others["past opponents"] = copies * (sampling + shape.parameters * how.weight_item)
    free = free if on_gpu else free // ranks
    plan = settled(
        replace(plan, others=others),
        free,
        training.max_seq_len,
        tokens=training.micro_token_budget,
        checkpointing=training.gradient_checkpointing,
        most=None if on_gpu else USUAL,
    )
    # The run's own server takes what the trainer does not need.
    spare = None if SERVER not in others else 0
    return with_logits(plan, free, spare if training.keep_logits is None else training.keep_logits)


def _engine(config: RunConfig, shape: ModelShape, on_gpu: bool) -> Engine | None:
    """The engine in this process, if there is one. On a CPU its slots grow with what is played, so
    only those that it begins with are certain."""
    inference = config.inference
    if inference.backend != "local" or not samples(config):
        return None
    context, limit = inference.max_context_tokens, shape.positions
    if context is None:
        device = "cuda" if on_gpu else "cpu"
        context = default_context(limit or config.training.max_seq_len, device)
    elif limit is not None and context > limit:
        raise ConfigError(
            f"inference.max_context_tokens={context} is more than the {limit} positions of "
            f"{config.model.name!r}: set it to {limit} at most"
        )
    if on_gpu:
        return Engine(config.slots, context, bool(inference.deterministic))
    return Engine(min(config.slots, _CPU_SLOTS), min(context, config.training.max_seq_len))


def _other_models(config: RunConfig, plan: Plan, device: torch.device) -> dict[str, int]:
    """The models that score or play beside the policy on its device, as far as it is known how
    large they are: all of them have the run's precision, and a player has an engine of its own."""
    scorers: list[tuple[str, OtherModelSection]] = []
    if config.training.steps:
        scorers = [("reference", config.reference)] if config.reference is not None else []
        scorers += [(f"teacher {n}", teacher) for n, teacher in enumerate(config.teacher, 1)]
    players = [(f"player {player.name}", player) for player in config.player]
    sizes: dict[str, int] = {}
    for name, section in [*scorers, *players]:
        if section.server is not None:
            continue
        own = as_model(config, section)
        place = check_device(own)
        if place.type != device.type or (place.index or 0) != (device.index or 0):
            continue
        if section.model == "start":
            copied = not start_is_below_adapter(config, sharded=plan.training.ranks > 1)
            sizes[name] = plan.shape.parameters * plan.training.weight_item if copied else 0
        elif (shape := shape_by_name(own)) is not None:
            sizes[name] = shape.parameters * plan.training.weight_item
            if (name, section) in players and plan.engine is not None:
                engine = replace(plan, shape=shape).engine_memory(plan.engine)
                sizes[name] += engine.total
    return sizes


def _plan_that_fits(config: RunConfig, shape: ModelShape, device: torch.device, free: int) -> Plan:
    """`plan_run`; raises `OutOfMemoryError` with the table and what would help."""
    plan = plan_run(config, shape, device, free)
    if not plan.fits(free):
        raise _refused(config, plan, free, "this run does not fit")
    return plan


def _refused(config: RunConfig, plan: Plan, free: int, why: str) -> OutOfMemoryError:
    advice = remedies(plan, free, config.training.max_seq_len)
    helps = "".join(f"\n  {remedy}" for remedy in advice) or "\n  nothing: the model is too large"
    table = indent(plan.table(free), "  ")
    place = "the GPU" if plan.training.device == "cuda" else "this machine"
    return OutOfMemoryError(
        f"{why} into {place}'s memory: {config.model.name}, {plan.shape.parameters / 1e9:.3g}B "
        f"parameters in {plan.training.precision}\n{table}\n"
        f"any one of these would make it fit:{helps}"
    )


def trainer_settings(config: RunConfig) -> TrainerConfig:
    """Returns the settings that the memory of an update depends on."""
    names = {"max_seq_len", "micro_token_budget", "gradient_checkpointing", "optimizer_device"}
    names |= {"compile", "fused_layers", "head_kernels", "keep_logits"}
    return TrainerConfig(
        **config.training.model_dump(include=names), precision=precision_of(config)
    )


def sampling_bytes(config: RunConfig, model: nn.Module) -> int:
    """What sampling takes of the trainer's device: the in-process engine, and for each past
    opponent another one with a copy of the model; or the vLLM server that is started there. Engines
    elsewhere take nothing."""
    where = next(model.parameters()).device
    if config.inference.backend != "local":
        if not server_shares_gpu(config, where):
            return 0
        total = torch.cuda.get_device_properties(where).total_memory
        stated, need = config.inference.vllm.gpu_memory, need_of_server(config, model)
        if stated is None and need is not None:
            return need.wanted
        return int((0.5 if stated is None else stated) * total)
    from ludic.inference.local.build import engine_memory

    engine = engine_memory(
        model,
        max_slots=config.slots,
        max_context_tokens=config.inference.max_context_tokens,
        deterministic=config.inference.deterministic,
    ).total
    copies = config.training.past_opponents
    return engine + copies * (engine + _weight_bytes(model))


def share_of_server(config: RunConfig, model: nn.Module) -> float | None:
    """Returns the share of the GPU's memory for the vLLM server that the run starts: as the run
    says, or as is left beside the trainer, whose `model` is on the GPU already; None, which is
    vLLM's own default, if the two are on different devices."""
    stated, device = config.inference.vllm.gpu_memory, next(model.parameters()).device
    if stated is not None or not server_shares_gpu(config, device):
        return stated
    free, total = torch.cuda.mem_get_info(device)
    return share_beside_trainer(
        total, free, beside_the_weights(config, model, free), need_of_server(config, model)
    )


def beside_the_weights(config: RunConfig, model: nn.Module, free: int) -> int:
    """Estimates what this process will still take of its GPU, where `free` bytes are left: for the
    training, and for other models, each counted as large as the policy. Half of what is left if the
    model does not say how large it is."""
    device = next(model.parameters()).device
    world = World(size=launched().size, device=device)
    training = trainer_bytes(model, trainer_settings(config), world)
    others = [config.reference, *config.teacher, *config.player]
    local = [other for other in others if other is not None and other.server is None]
    copies = len(local) + config.training.past_opponents
    return (free // 2 if training is None else training) + copies * _weight_bytes(model)


def need_of_server(config: RunConfig, model: nn.Module | ModelShape) -> ServerNeed | None:
    """Estimates what the run's vLLM server needs of each of its GPUs."""
    item = sampling_dtype(precision_of(config)).itemsize
    batched = config.inference.vllm.flag("max-num-batched-tokens")
    facts: dict[str, Any] | ModelShape
    if isinstance(model, ModelShape):
        facts, parameters = model, model.parameters
    else:
        facts, parameters = config_facts(model), sum(p.numel() for p in model.parameters())
    return server_need(
        facts,
        weights=parameters * item,
        item=item,
        slots=config.slots,
        context=config.inference.max_context_tokens,
        batched_tokens=batched if isinstance(batched, int) else None,
        gpus=_gpus(config),
    )


def server_shares_gpu(config: RunConfig, device: torch.device) -> bool:
    """Whether the run starts a vLLM server that will compute on the trainer's `device`: it takes
    the first GPUs that this process sees."""
    inference = config.inference
    started = inference.backend == "vllm" and not inference.servers
    return started and device.type == "cuda" and (device.index or 0) < _gpus(config)


def _gpus(config: RunConfig) -> int:
    """How many GPUs the server that is started is spread over."""
    names = ("tensor-parallel-size", "pipeline-parallel-size")
    sizes = [config.inference.vllm.flag(name) for name in names]
    tensor, pipeline = (size if isinstance(size, int) else 1 for size in sizes)
    return tensor * pipeline


def _weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def calibrate_run(run: str, overrides: Sequence[str] = ()) -> tuple[Calibration, float | None]:
    """Measures real updates of the run's model without changing its weights. The budget leaves room
    for what samples on the same GPU: the engines in this process, or the vLLM server that the run
    starts, whose share of the GPU to state is returned, too. Needs a GPU."""
    config, weights = locate(run, overrides)
    model, _ = build_model(config, weights)
    loss = algorithm_of(config).loss
    reserved = sampling_bytes(config, model)
    measured = calibrate(model, loss, trainer_settings(config), reserved_bytes=reserved)
    beside = server_shares_gpu(config, next(model.parameters()).device)
    return measured, round(reserved / measured.total_bytes, 4) if beside else None
