"""A run's model and tokenizer: created or loaded, with an adapter if asked, on its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ludic.errors import ConfigError, LudicError, MissingExtraError
from ludic.precision import Precision, default_precision, weights_dtype
from ludic.runs.settings import ModelSection, RunConfig
from ludic.seeding import derive_seed


def build_model(config: RunConfig, weights: Path | None = None) -> tuple[nn.Module, Any]:
    """Returns the run's model and tokenizer; `weights` is the `model` folder of a checkpoint."""
    section, dtype = config.model, weights_dtype(precision_of(config))
    if section.name == "tiny":
        from ludic.inference.tiny import tiny_model, tiny_tokenizer

        options = dict(section.kwargs)
        seed = derive_seed(config.run.seed, "model")
        try:
            tokenizer = tiny_tokenizer(words=options.pop("words", ()))
            model: nn.Module = tiny_model(seed, vocab_size=len(tokenizer), **options)
            model.to(dtype)
        except Exception as exc:  # of many kinds, but about these arguments: there are no others
            raise ConfigError(f"model.kwargs does not fit the tiny model: {exc}") from exc
    else:
        model, tokenizer = _from_pretrained(section, dtype)
    if section.lora is not None:
        model = _with_adapter(model, section)
    if weights is not None:
        load_weights(model, weights)
    return model.to(check_device(section)), tokenizer


def precision_of(config: RunConfig) -> Precision:
    """Returns what trainer and engine compute in: as the run says, or as its device suggests."""
    section = config.model
    said = section.precision or section.dtype
    return said or default_precision(check_device(section).type)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Loads a checkpoint's weights; raises if they are of another model."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no weights: has the run saved a checkpoint yet?")
    state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, state)
        return
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        names = [*unexpected, *(set(missing) - tied)]
        raise ConfigError(f"{folder} comes from another model: {names[0]!r} does not fit")


def _from_pretrained(section: ModelSection, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"revision": section.revision} if section.revision else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(section.name, **options)
        model = AutoModelForCausalLM.from_pretrained(
            section.name, dtype=dtype, **options, **section.kwargs
        )
    except (OSError, ValueError) as exc:
        reason = str(exc).strip().splitlines()[0]
        raise ConfigError(
            f'model.name={section.name!r} is neither "tiny" nor a model that can be loaded from '
            f"a folder or the hub: {reason}"
        ) from exc
    except TypeError as exc:
        raise ConfigError(f"model.kwargs does not fit {section.name!r}: {exc}") from exc
    return model, tokenizer


def _with_adapter(model: nn.Module, section: ModelSection) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as exc:
        raise MissingExtraError("peft", "peft") from exc
    assert section.lora is not None
    adapter = LoraConfig(
        r=section.lora.rank,
        lora_alpha=section.lora.alpha,
        target_modules=section.lora.target_modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with configuring("model.lora"):
        wrapped: nn.Module = get_peft_model(model, adapter)
        return wrapped


def check_device(section: ModelSection) -> torch.device:
    """Returns the device to put the model on; raises if this machine does not have it."""
    name = section.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"model.device={name!r} is not a device that torch knows") from exc
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device={name!r}: a run trains on cpu or cuda, set one of them")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= there:
        raise ConfigError(
            f"model.device={name!r}, but this machine has {there or 'no'} GPU that torch can use: "
            "set model.device=cpu" + (f" or below cuda:{there}" if there else "")
        )
    return device


@contextmanager
def configuring(what: str) -> Iterator[None]:
    """Turns a constructor's complaint about its arguments into a `ConfigError` about `what`."""
    try:
        yield
    except LudicError:
        raise
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{what}: {exc}") from exc
