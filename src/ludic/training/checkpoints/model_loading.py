"""Models and adapters on disk, as transformers and PEFT write them; and telling models apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import CheckpointError
from ludic.sharding.weights import whole
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


@torch.no_grad()
def model_fingerprint(model: nn.Module) -> str:
    """A short name for the model's structure and its frozen weights.

    Names, shapes and which parameters are trained count, and a few values of each frozen one.
    Trained values do not: they change.
    """
    digest = blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.requires_grad}".encode())
        if not parameter.requires_grad and not hasattr(parameter, "full_tensor"):
            values = parameter.detach().flatten()[:_SAMPLED].float().cpu().numpy()
            digest.update(values.tobytes())
    return digest.hexdigest()
