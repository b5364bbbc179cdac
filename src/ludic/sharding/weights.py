"""A model's weights as a sampler wants them: whole tensors, in the model's own names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import CheckpointError, PublishError
from ludic.plumbing.model_parts import base_causal_lm
from ludic.seeding import keyed_uniform

_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
_MERGED = tuple(f".{name}." for pair in _PAIRS for name in pair)
_OF_PEFT = (".lora_", ".trainable_tokens_", ".token_adapter.", ".ia3_", ".oft_", ".vera_")


class ModelWeights:
    """The model's weights one by one: shards gathered, adapters merged.

    A LoRA adapter is added to a copy of its base weight in float32; the module itself is never
    changed, so publishing any number of times causes no drift. What cannot be merged is refused
    by name (`PublishError`). Under FSDP2 iterating is a collective: every rank must do it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor, merge in self.parts():
            yield name, whole(tensor) if merge is None else merge()

    def parts(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        """Each weight's name, and the parameter as this rank has it: sharded, under FSDP2. The
        third is None where the parameter is the weight; else it gathers the weight and merges its
        adapter, a collective. Nothing is gathered before."""
        adapters = {name: module for name, module in self.model.named_modules() if _is_lora(module)}
        named = dict(self.model.named_parameters(remove_duplicate=False))
        _refuse_what_cannot_be_merged(named, adapters)
        tied = _tied_to_others(self.model)
        first: dict[int, nn.Module | None] = {}
        for name, tensor in named.items():
            if any(part in name for part in (*_MERGED, ".original_module.")):
                continue
            owner, _, rest = name.rpartition(".base_layer.")
            adapter = adapters.get(owner) if rest in ("weight", "bias") else None
            if id(tensor) in first:
                if adapter is not None or first[id(tensor)] is not None:
                    raise _apart(name)
                continue
            first[id(tensor)] = adapter
            plain = plain_name(name)
            if plain in tied:  # a separate copy (`modules_to_save`), which no server would use
                raise _apart(name)
            merge = None if adapter is None else partial(_merged, adapter, rest, tensor)
            yield plain, tensor, merge


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


def own_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor; the tensor itself where it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def laid_out_like(rows: Tensor, like: Tensor) -> Tensor:
    """`rows` as this rank's part of a tensor that is sharded as `like` is, on whichever device they
    are; `rows` itself where that is not sharded."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    if not isinstance(like, DTensor):
        return rows
    meta = TensorMeta(like.shape, like.stride(), rows.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(rows, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers and vLLM load: others, such as `consolidated.safetensors`, hold
    the same weights under other names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / file for file in sorted(files)]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def plain_name(name: str) -> str:
    """A parameter's name without what PEFT puts around it."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    before, saved, after = name.partition(".modules_to_save.")
    return f"{before}.{after.partition('.')[2]}" if saved else name


def _tied_to_others(model: nn.Module) -> frozenset[str]:
    """Names of weights that are other weights, by the model's own word: servers go by it."""
    causal = base_causal_lm(model)
    if not getattr(getattr(causal, "config", None), "tie_word_embeddings", False):
        return frozenset()
    return frozenset(getattr(causal, "_tied_weights_keys", None) or ())


def _apart(name: str) -> PublishError:
    return PublishError(
        f"{plain_name(name)} is tied to another weight, and what was trained sets them apart: a "
        "server would give both the same. Untie them before training (tie_word_embeddings=false), "
        "or train without it"
    )


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "get_delta_weight")


def _refuse_what_cannot_be_merged(
    named: Mapping[str, Tensor], adapters: Mapping[str, nn.Module]
) -> None:
    """Raises for a trained part of an adapter that would be left out without a word."""
    for name in named:
        if not any(part in name for part in _OF_PEFT):
            continue
        part = next((part for part in _MERGED if part in name), None)
        owner = name.partition(part)[0] if part else ""
        module = adapters.get(owner)
        bias = name.endswith(".bias") and f"{owner}.base_layer.bias" not in named
        # A wrapper around a bare parameter (`target_parameters`) computes something else.
        if part is None or module is None or bias or hasattr(module, "parameter_name"):
            raise PublishError(
                f"{name} cannot be merged into the weights that a server has: train without it "
                "(plain LoRA on linear layers and embeddings can be merged, and `lora_bias` where "
                "the layer itself has a bias)"
            )


@torch.no_grad()
def _merged(module: Any, rest: str, shard: Tensor) -> Tensor:
    """Base plus adapters, computed in float32 and rounded once; `rest` is `weight` or `bias`."""
    base = whole(shard)
    result = base.float().clone()
    for adapter in module.active_adapters:
        for left, right in _PAIRS:
            a, b = (getattr(module, name) for name in (left, right))
            if adapter not in a:
                continue
            if rest == "weight":
                delta = _tensor(b[adapter]) @ _tensor(a[adapter])
                turned = left == "lora_embedding_A" or getattr(module, "fan_in_fan_out", False)
                result += (delta.t() if turned else delta) * module.scaling[adapter]
            elif getattr(b[adapter], "bias", None) is not None:
                result += whole(b[adapter].bias).float() * module.scaling[adapter]
    return result.to(base.dtype)


def _tensor(part: nn.Module | Tensor) -> Tensor:
    """One half of an adapter in float32: linear layers have layers there, embeddings tensors."""
    return whole(part if isinstance(part, Tensor) else part.weight).float()  # type: ignore[arg-type]


_DITHERED_AT_ONCE = 1 << 22


@torch.no_grad()
def dithered(parameter: Tensor, key: int) -> Tensor:
    """A float32 master for a bfloat16 or float16 weight: a number drawn evenly from those that
    round to the weight, the same for every sharding.

    If each master began at its weight itself, none of the rounded weights would move before a
    master had moved by half their spacing, which takes tens of updates at a small learning rate,
    and then many would move together. So placed, the share of the weights that a step moves, times
    their spacing, is the step.
    """
    master = parameter.detach().float().contiguous()
    rows, first, _ = local_rows(master)
    if rows is None:
        return master
    flat = rows.view(-1)
    begin = (first or 0) * (rows[0].numel() if rows.ndim else 1)
    eps = torch.finfo(parameter.dtype).eps
    for start in range(0, len(flat), _DITHERED_AT_ONCE):
        part = flat[start : start + _DITHERED_AT_ONCE]
        place = torch.arange(len(part), device=part.device) + (begin + start)
        noise = keyed_uniform(torch.full_like(place, key), place).sub_(0.5)
        spacing = torch.ldexp(torch.full_like(part, eps / 2), torch.frexp(part).exponent)
        moved = part + spacing * noise.float()
        # Below a power of two the numbers lie closer, and around zero they lie much closer.
        stays = (moved.to(parameter.dtype) == part) & (part != 0)
        part.copy_(torch.where(stays, moved, part))
    return master


def is_rounded(parameter: Tensor) -> bool:
    """Whether these are the numbers of a bfloat16 checkpoint, in float32."""
    rows = local_rows(parameter.detach())[0]
    return rows is not None and bool((rows == rows.bfloat16()).all())
