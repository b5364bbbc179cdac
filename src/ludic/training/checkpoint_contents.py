"""One checkpoint: its contents, whether it is complete, and how to load it.

A checkpoint is a folder:

    manifest.json      what is in it: every file with size and checksum, every tensor's pieces
    model/             the model (or adapter) as transformers and PEFT load it
    state-*.safetensors  per rank: the trained weights, the optimizer's moments, RNG states
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ludic.errors import CheckpointError, DamagedCheckpointError
from ludic.plumbing.files import file_checksum, sync
from ludic.sharding.weights import laid_out_like, local_rows, whole
from ludic.sharding.world import World
from ludic.training.update.optimizer import MasterAdamW

FORMAT = 2


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a trainer is besides tensors. `curve` are the learning rate's settings; `parts` are the
    states of batch source, algorithm and whatever else is saved, as JSON."""

    step: int
    version: int
    nonfinite_steps: int = 0
    curve: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: MasterAdamW,
    world: World | None = None,
    *,
    manifest: Mapping[str, Any] | None = None,
) -> TrainerState:
    """Brings model, optimizer and RNG to the checkpoint's state, on any number of ranks.

    Raises `CheckpointError` when a file is missing, cut or changed, or the model is another. With
    the `manifest` that `verify_checkpoint` returned, the files are not checked again.
    """
    path, world = Path(path), world or World()
    manifest = manifest or verify_checkpoint(path)
    own = model_fingerprint(model)
    if not manifest["tensors"]:
        raise CheckpointError(
            f"{path} has only the model's weights, since the run was not resumable: start another "
            "run from them, with this run's folder as its model.name"
        )
    if manifest["fingerprint"] not in (own, model_fingerprint(model, frozen_values=False)):
        raise CheckpointError(
            f"{path} is a checkpoint of another model (fingerprint {manifest['fingerprint']}, this "
            f"one has {own}): names, shapes and frozen weights must be the same"
        )
    wanted = trainer_tensors(optimizer, moments=True)
    loaded = load_tensors(path, manifest["tensors"], wanted, required=trainer_tensors(optimizer))
    with torch.no_grad():
        for name, parameter in optimizer.parameters.items():
            parameter.copy_(loaded[f"{name}/weight"])
            if optimizer.masters[name] is not parameter:
                loaded[f"{name}/master"] = loaded[f"{name}/weight"]
    optimizer.load_state_dict(loaded)
    _load_rng(path, manifest, world)
    return TrainerState(**manifest["state"])


def verify_checkpoint(path: str | Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint; raises `DamagedCheckpointError` for anything less."""
    path = Path(path)
    try:
        manifest = _read_manifest(path / "manifest.json")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise DamagedCheckpointError(
            f"{path} is not a whole checkpoint: its manifest: {exc!r}"
        ) from exc
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != facts["bytes"]:
            raise DamagedCheckpointError(f"{path} is half-written: {name} is missing or cut")
        try:
            whole = _is_as_written(file, facts)
        except OSError as exc:
            raise DamagedCheckpointError(f"{path} is damaged: {name}: {exc}") from exc
        if not whole:
            raise DamagedCheckpointError(f"{path} is damaged: {name} is not what was written")
    return manifest


def _read_manifest(file: Path) -> dict[str, Any]:
    """The manifest, if it names all that a checkpoint must have: the model, and the file of every
    rank. One that names nothing would let anything pass for whole."""
    manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    version = manifest["format"]
    if version > FORMAT:
        raise CheckpointError(
            f"{file.parent} has format {version}; this Ludic reads up to {FORMAT}"
        )
    TrainerState(**manifest["state"])
    files, needed = manifest["files"], {"fingerprint", "tensors", "world_size"}
    if missing := needed - manifest.keys():
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    states = {f"state-{rank:05d}.safetensors" for rank in range(manifest["world_size"])}
    states |= {p["file"] for facts in manifest["tensors"].values() for p in facts["pieces"]}
    if unnamed := sorted(states - files.keys()):
        raise ValueError(f"it does not name {', '.join(unnamed)}")
    if not any(name.startswith("model/") for name in files):
        raise ValueError("it names no file of the model")
    for name, facts in files.items():
        if not (isinstance(facts["bytes"], int) and facts.keys() & {"checksum", "blake2b"}):
            raise ValueError(f"it does not say what {name} is to be")
    return manifest


def trainer_tensors(optimizer: MasterAdamW, *, moments: bool = False) -> dict[str, Tensor]:
    """The trained weights in full precision, and the optimizer's state.

    With `moments`, also the places of moments that a fresh optimizer does not have yet.
    """
    tensors = {f"{name}/weight": master for name, master in optimizer.masters.items()}
    for key, value in optimizer.state_dict().items():
        if not key.endswith("/master"):
            tensors[key] = value
    if moments:
        for name, master in optimizer.masters.items():
            tensors.setdefault(f"{name}/exp_avg", master)
            tensors.setdefault(f"{name}/exp_avg_sq", master)
            tensors.setdefault(f"{name}/step", torch.zeros(()))
    return tensors


def has_room_for(tensors: Iterable[Tensor]) -> bool:
    """Whether copies fit beside all that training has taken so far, with a quarter to spare: its
    next step may need every byte that was ever its own."""
    needs: dict[torch.device, int] = {}
    for tensor in tensors:
        if (rows := local_rows(tensor)[0]) is not None:
            size = rows.numel() * rows.element_size()
            needs[rows.device] = needs.get(rows.device, 0) + size
    return all(4 * _free_bytes(device) >= 5 * needed for device, needed in needs.items())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return sys.maxsize
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's random streams, on the CPU and on `device`."""
    state = {"rng/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng/cuda"] = torch.cuda.get_rng_state(device)
    return state


def _load_rng(path: Path, manifest: Mapping[str, Any], world: World) -> None:
    if manifest["world_size"] != world.size:
        return  # other ranks, other streams: nothing that could be the same
    with safe_open(path / f"state-{world.rank:05d}.safetensors", framework="pt") as file:
        torch.set_rng_state(file.get_tensor("rng/cpu"))
        if world.device.type == "cuda" and "rng/cuda" in file.keys():  # noqa: SIM118
            torch.cuda.set_rng_state(file.get_tensor("rng/cuda"), world.device)


def _is_as_written(file: Path, facts: Mapping[str, Any]) -> bool:
    """Whether the file's bytes are those that the manifest knows of."""
    if "checksum" in facts:
        return bool(file_checksum(file) == facts["checksum"])
    digest = blake2b(digest_size=16)  # as manifests up to format 1 have it
    with file.open("rb") as data:
        while block := data.read(1 << 22):
            digest.update(block)
    return bool(digest.hexdigest() == facts["blake2b"])


def write_shard(
    folder: Path, tensors: Mapping[str, Tensor], extra: Mapping[str, Tensor], world: World
) -> None:
    """Writes this rank's rows of every tensor; one that is not sharded, rank 0 alone."""
    local: dict[str, Tensor] = dict(extra)
    described: dict[str, Any] = {}
    for name, tensor in tensors.items():
        rows, offset, shape = local_rows(tensor)
        if rows is None or (offset is None and not world.leads):
            continue
        local[name] = rows.detach().to("cpu").contiguous()
        described[name] = {"shape": list(shape), "offset": offset or 0}
    file = f"state-{world.rank:05d}.safetensors"
    save_file(local, folder / file, metadata={"pieces": json.dumps(described)})
    sync(folder / file)


def describe_shards(folder: Path, ranks: int) -> dict[str, Any]:
    """Every tensor's shape, and which of the ranks' files has which of its rows."""
    result: dict[str, Any] = {}
    for rank in range(ranks):
        name = f"state-{rank:05d}.safetensors"
        with safe_open(folder / name, framework="pt") as opened:
            for key, facts in json.loads(opened.metadata()["pieces"]).items():
                entry = result.setdefault(key, {"shape": facts["shape"], "pieces": []})
                entry["pieces"].append({"file": name, "offset": facts["offset"]})
    return result


def load_tensors(
    folder: Path,
    described: Mapping[str, Any],
    wanted: Mapping[str, Tensor],
    *,
    required: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Each tensor of `wanted`, laid out as it is there, from whichever files have its rows."""
    loaded: dict[str, Tensor] = {}
    files = {p["file"] for entry in described.values() for p in entry["pieces"]}
    opened = {f: safe_open(folder / f, framework="pt") for f in files}
    for name, like in wanted.items():
        if name not in described:
            if name in required:
                raise CheckpointError(f"{folder} lacks {name!r}: a checkpoint of another model")
            continue
        if tuple(described[name]["shape"]) != tuple(like.shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {described[name]['shape']} there, "
                f"{list(like.shape)} here: a checkpoint of another model"
            )
        loaded[name] = _read_like(name, like, described[name]["pieces"], opened)
    return loaded


def _read_like(name: str, like: Tensor, pieces: Any, opened: Mapping[str, Any]) -> Tensor:
    from torch.distributed.tensor import DTensor

    if like.ndim == 0:
        return opened[pieces[0]["file"]].get_tensor(name)  # type: ignore[no-any-return]
    rows, offset, _ = local_rows(like)
    start = offset or 0
    count = 0 if rows is None else rows.shape[0]
    parts = []
    for piece in sorted(pieces, key=lambda p: p["offset"]):
        part = opened[piece["file"]].get_slice(name)
        begin, size = piece["offset"], part.get_shape()[0]
        low, high = max(start, begin), min(start + count, begin + size)
        if low < high:
            parts.append(part[low - begin : high - begin])
    local = torch.cat(parts) if parts else torch.empty(0, *like.shape[1:], dtype=like.dtype)
    return laid_out_like(local.to(like.device) if isinstance(like, DTensor) else local, like)


_SAMPLED = 16


def save_model(model: nn.Module, world: World, tokenizer: Any = None) -> Callable[[Path], None]:
    """Gathers the weights now (on every rank) and returns what writes them (on rank 0).

    A PEFT model is saved as its adapter, any other as a whole; the tokenizer, if any, beside it.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in _saved_tensors(model).items():
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


def _saved_tensors(model: Any) -> dict[str, Tensor]:
    """What a saved model consists of: of a PEFT model, what PEFT takes for part of an adapter."""
    named: dict[str, Tensor] = model.state_dict()
    if not hasattr(model, "peft_config"):
        return named
    from peft import get_peft_model_state_dict

    chosen: set[int] = set()
    for adapter in model.peft_config:
        options = {"adapter_name": adapter, "save_embedding_layers": False}
        chosen |= set(map(id, get_peft_model_state_dict(model, named, **options).values()))
    # Of AdaLoRA's, once it has chosen ranks, PEFT gives parts, which are other tensors.
    return {n: tensor for n, tensor in named.items() if id(tensor) in chosen or ".lora_" in n}


def left_out(model: nn.Module) -> list[str]:
    """The trained weights that a saved model does not have: those beside an adapter."""
    saved = _saved_tensors(model)
    return [n for n, p in model.named_parameters() if p.requires_grad and n not in saved]


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
