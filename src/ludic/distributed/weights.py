"""A model's weights as a sampler wants them: whole tensors, in the model's own names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ludic.errors import CheckpointError, PublishError

_LEFT_OUT = (
    ".lora_A.",
    ".lora_B.",
    ".lora_embedding_A.",
    ".lora_embedding_B.",
    ".original_module.",
)


class ModelWeights:
    """The model's weights one by one: shards gathered, adapters merged.

    A LoRA adapter is added to a copy of its base weight in float32; the module itself is never
    changed, so publishing any number of times causes no drift. Under FSDP2 iterating is a
    collective: every rank must do it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        adapters = {name: module for name, module in self.model.named_modules() if _is_lora(module)}
        first: dict[int, str] = {}
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            if any(part in name for part in _LEFT_OUT):
                continue
            owner, _, rest = name.rpartition(".base_layer.")
            adapter = adapters.get(owner) if rest == "weight" else None
            if id(tensor) in first:
                if adapter is not None:
                    raise PublishError(
                        f"{plain_name(name)} has an adapter but is tied to {first[id(tensor)]}: "
                        "merged they would differ; untie them, or take the adapter off"
                    )
                continue
            first[id(tensor)] = plain_name(name)
            value = whole(tensor)
            yield plain_name(name), value if adapter is None else _merged(adapter, value)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of which `tensor` may be a shard, without gradient."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def local_rows(tensor: Tensor) -> tuple[Tensor | None, int | None, tuple[int, ...]]:
    """This rank's rows, where they begin in the whole, and the whole's shape.

    The offset is None for a tensor that every rank has whole; the rows are None where a rank has
    none.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor, None, tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if any(size != whole for size, whole in zip(shape[1:], tensor.shape[1:], strict=True)):
        raise CheckpointError("only sharding by rows can be saved")
    rows = tensor.to_local()
    return (rows if rows.numel() else None), int(offset[0]), tuple(tensor.shape)


def plain_name(name: str) -> str:
    """A parameter's name without what PEFT puts around it."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    before, saved, after = name.partition(".modules_to_save.")
    return f"{before}.{after.partition('.')[2]}" if saved else name


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")


@torch.no_grad()
def _merged(module: nn.Module, base: Tensor) -> Tensor:
    """Base plus adapters, computed in float32 and rounded once."""
    result = base.float().clone()
    for adapter in module.active_adapters:  # type: ignore[union-attr]
        if adapter not in module.lora_A:  # type: ignore[operator]
            continue
        a = whole(module.lora_A[adapter].weight).float()  # type: ignore[index, union-attr]
        b = whole(module.lora_B[adapter].weight).float()  # type: ignore[index, union-attr]
        delta = (b @ a) * module.scaling[adapter]  # type: ignore[index]
        result += delta.t() if getattr(module, "fan_in_fan_out", False) else delta
    return result.to(base.dtype)
