"""Models and adapters on disk, as transformers and PEFT write them; and telling models apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ludic.errors import CheckpointError
from ludic.sharding.weights import local_rows, whole
from ludic.sharding.world import World

_SAMPLED = 16


def save_model(model: nn.Module, world: World, tokenizer: Any = None) -> Callable[[Path], None]:
    """Gathers the weights now (on every rank) and returns what writes them (on rank 0).

    A PEFT model is saved as its adapter, any other as a whole; the tokenizer, if any, beside it.
    """
    is_adapter = hasattr(model, "peft_config")
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if is_adapter and not _belongs_to_adapter(name):
            continue
        value = whole(tensor)
        if world.leads:
            state[name] = value.to("cpu", copy=True)

    def write(folder: Path) -> None:
        save: Any = getattr(model, "save_pretrained", None)
        if save is None:
            raise CheckpointError(f"{type(model).__name__} has no save_pretrained")
        with no_progress_bar():
            save(str(folder), state_dict=state)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(folder))

    return write


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Inside, transformers saves without drawing on the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _belongs_to_adapter(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


def model_fingerprint(model: nn.Module, *, frozen_values: bool = True) -> str:
    """A short name for the model's structure and its frozen weights, the same on any number of
    ranks. Of a sharded model it is a collective.

    Names, shapes and which parameters are trained count, and the first few values of each frozen
    one. Trained values do not: they change. Without `frozen_values` it is the name that older
    checkpoints of sharded models have.
    """
    digest = blake2b(digest_size=16)
    named = sorted(model.named_parameters())
    frozen = {name: p for name, p in named if not p.requires_grad} if frozen_values else {}
    values = _first_values(frozen)
    for name, parameter in named:
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.requires_grad}".encode())
        if name in values:
            digest.update(values[name].numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def _first_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first values of each tensor, in float32. Those of sharded ones may be on any rank: each
    puts its own where they belong, and one sum over all ranks gathers them for all tensors."""
    pieces: dict[str, Tensor] = {}
    sharded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        rows, offset, shape = local_rows(tensor)
        count = min(prod(shape), _SAMPLED)
        pieces[name] = torch.zeros(count)
        if offset is not None:
            sharded[name] = tensor
        start = (offset or 0) * prod(shape[1:])
        if rows is not None and start < count:
            own = rows.detach().flatten()[: count - start].float().cpu()
            pieces[name][start : start + len(own)] = own
    if sharded:
        # As integers: a sum with zeros then keeps every bit, also of a negative zero.
        bits = torch.cat([pieces[name] for name in sharded]).view(torch.int32)
        first: Any = next(iter(sharded.values()))
        gathered = bits.to(first.device)
        dist.all_reduce(gathered, group=first.device_mesh.get_group())
        parts = torch.split(gathered.cpu().view(torch.float32), [len(pieces[n]) for n in sharded])
        pieces |= dict(zip(sharded, parts, strict=True))
    return pieces
