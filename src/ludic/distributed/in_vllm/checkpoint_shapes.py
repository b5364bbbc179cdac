"""Names and shapes of the checkpoint that a server was started from. Imported by vLLM alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

Shape = tuple[int, ...]

_NEVER_SENT = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def checkpoint_shapes(
    model: str, *, revision: str | None = None, cache: str | None = None
) -> dict[str, Shape] | None:
    """What is in `model`, a folder or a name on the hub that was downloaded (into `cache`, else
    the hub's own); None where that cannot be found out."""
    from safetensors import safe_open

    folder = _local_folder(model, revision, cache)
    shapes: dict[str, Shape] = {}
    try:
        for file in [] if folder is None else _weight_files(folder):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
    except FileNotFoundError:  # not all of it is here
        return None
    kept = {n: s for n, s in shapes.items() if not n.endswith(_NEVER_SENT)}
    return kept or None


def same_under_other_names(one: Mapping[str, Shape], other: Mapping[str, Shape]) -> bool:
    """Whether both have tensors of the same shapes and no name in common: transformers renames
    some models' tensors when it loads them, and vLLM knows them by either name."""
    return not one.keys() & other.keys() and sorted(one.values()) == sorted(other.values())


def _local_folder(model: str, revision: str | None, cache: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, ValueError):  # not downloaded by this name, or no such name
        return None
    return Path(found)


def _weight_files(folder: Path) -> list[Path]:
    """The files that vLLM loads: others, such as `consolidated.safetensors`, hold the same weights
    under other names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / file for file in sorted(files)]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
