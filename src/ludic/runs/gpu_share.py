"""What trainer and sampler take of one GPU, and what is left for either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ludic.inference.vllm.memory import ServerNeed, server_need, share_beside_trainer
from ludic.plumbing.model_parts import config_facts
from ludic.plumbing.precision import sampling_dtype
from ludic.runs.locate import locate
from ludic.runs.model import algorithm_of, build_model, precision_of
from ludic.runs.settings import RunConfig
from ludic.sharding.ranks import launched
from ludic.sharding.world import World
from ludic.training import TrainerConfig
from ludic.training.update.budget import trainer_bytes
from ludic.training.update.calibrate import Calibration, calibrate


def trainer_settings(config: RunConfig) -> TrainerConfig:
    """Returns the settings that the memory of an update depends on."""
    names = {"max_seq_len", "micro_token_budget", "gradient_checkpointing", "optimizer_device"}
    names |= {"compile", "fused_layers", "head_kernels"}
    return TrainerConfig(
        **config.training.model_dump(include=names), precision=precision_of(config)
    )


def sampling_bytes(config: RunConfig, model: nn.Module, device: torch.device | None = None) -> int:
    """What sampling takes of the trainer's device: the in-process engine, and for each past
    opponent another one with a copy of the model; or the vLLM server that is started there. Engines
    elsewhere take nothing."""
    where = device or next(model.parameters()).device
    if config.inference.backend != "local":
        if not server_shares_gpu(config, where):
            return 0
        total = torch.cuda.get_device_properties(where).total_memory
        stated, need = config.inference.vllm.gpu_memory, need_of_server(config, model)
        if stated is None and need is not None:
            return need.wanted
        return int((0.5 if stated is None else stated) * total)
    from ludic.inference.local.sizes import engine_memory

    engine = engine_memory(
        model,
        max_slots=config.slots,
        max_context_tokens=config.inference.max_context_tokens,
        deterministic=config.inference.deterministic,
        device=device,
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
    here = [other for other in others if other is not None and other.server is None]
    copies = len(here) + config.training.past_opponents
    return (free // 2 if training is None else training) + copies * _weight_bytes(model)


def need_of_server(config: RunConfig, model: nn.Module) -> ServerNeed | None:
    """Estimates what the run's vLLM server needs of each of its GPUs."""
    inference, vllm = config.inference, config.inference.vllm
    item = sampling_dtype(precision_of(config)).itemsize
    batched = vllm.flag("max-num-batched-tokens")
    return server_need(
        config_facts(model),
        weights=sum(p.numel() for p in model.parameters()) * item,
        item=item,
        slots=config.slots,
        context=inference.max_context_tokens,
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
