"""FSDP2: the model's layers sharded over a mesh of ranks. `torchrun` starts the ranks."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ludic.errors import CheckpointError, ConfigError
from ludic.plumbing.model_parts import decoder_layers
from ludic.sharding.weights import local_rows, weight_files


def init_mesh(device: str | None = None, *, timeout_s: float = 1800.0) -> DeviceMesh:
    """Joins the ranks that `torchrun` started and returns the mesh over all of them.

    `timeout_s` bounds every collective; ranks wait in one while rank 0 samples a batch, so it
    must be longer than that takes.
    """
    if "RANK" not in os.environ:
        raise ConfigError("RANK is not set: start the script with `torchrun --nproc-per-node N …`")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    if kind == "cpu":
        atexit.register(_leave_gloo)
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("ranks",))


def _leave_gloo() -> None:
    """Lets gloo's threads finish with Python before Python ends.

    They drop the tensors of the last collective a moment after its caller goes on, and need the
    interpreter for it; one that is already ending makes them abort the process. They live as long
    as anything refers to their group, so destroying it is not enough.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(0.2)


def shard_policy(policy: nn.Module, mesh: DeviceMesh) -> None:
    """Shards every layer of `policy.model`, and the rest with `policy` itself as the root.

    The parameters stay in their type: what is gathered is what computes.
    """
    for layer in decoder_layers(policy.model):  # type: ignore[arg-type]
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Inside, modules are built without memory for their parameters; buffers are real.

    For models that no single rank could hold: build, shard, then `load_sharded`.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and param.device.type != "meta":
            empty = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            self._parameters[name] = empty

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@torch.no_grad()
def load_sharded(model: nn.Module, folder: str | Path, device: torch.device) -> None:
    """Fills a sharded model from a transformers folder of safetensors.

    Every rank reads only its own rows; parameters without memory get it first. Raises
    `CheckpointError` where the folder lacks a tensor, or has one of another shape.
    """
    model._apply(  # type: ignore[no-untyped-call] # how FSDP2 hears of new storage
        lambda t: torch.empty_like(t, device=device) if t.device.type == "meta" else t.to(device)
    )
    files = _tensor_files(Path(folder))
    filled: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in filled:
            continue
        if name in files:
            _fill(parameter, files[name], name)
            filled.add(id(parameter))
    for name, parameter in model.named_parameters():
        if id(parameter) not in filled:
            raise CheckpointError(f"{folder} has no tensor {name!r}: is it another model's?")


def _fill(parameter: nn.Parameter, file: Path, name: str) -> None:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        part = opened.get_slice(name)
        if tuple(part.get_shape()) != tuple(parameter.shape):
            raise CheckpointError(
                f"{file}: {name} has shape {part.get_shape()}, the model's is "
                f"{list(parameter.shape)}: is it another model's?"
            )
        rows, offset, _ = local_rows(parameter)
        if rows is not None:
            start = offset or 0
            rows.copy_(part[start : start + rows.shape[0]])


def _tensor_files(folder: Path) -> Mapping[str, Path]:
    """Which file holds which tensor."""
    from safetensors import safe_open

    files: dict[str, Path] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    if not files:
        raise CheckpointError(f"{folder} holds no model.safetensors")
    return files
