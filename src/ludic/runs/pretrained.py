"""Models and tokenizers from a folder or the hub, weights of a checkpoint, and adapters."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ludic.envs.adapters import load_package
from ludic.errors import ConfigError
from ludic.plumbing.arguments import unknown_argument
from ludic.runs.settings import ModelSection
from ludic.runs.settings.base import configuring
from ludic.training.checkpoint_contents import no_progress_bar

HUB_TIMEOUT_S = 10.0


def load_tokenizer(name: str, where: str) -> Any:
    """Returns the tokenizer of a folder or of a name on the hub."""
    from transformers import AutoTokenizer

    options = where_from(name, None, f"{where}: tokenizer={name!r}")
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as exc:
        reason = shorten(str(exc), 600, placeholder=" …")
        raise ConfigError(f"{where}: tokenizer={name!r} cannot be loaded: {reason}") from exc


def where_from(name: str, revision: str | None, what: str) -> dict[str, Any]:
    """Returns the options to load `name` with: nothing more if it is a folder or the hub answers,
    else only what this machine has of it. Raises if that is nothing: loading would try for
    minutes to reach the hub."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if Path(name).exists() or constants.HF_HUB_OFFLINE:
        return {}
    try:
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
    except Exception as exc:  # of the HTTP client, which differ between versions of the hub's
        if isinstance(exc, ValueError) or getattr(exc, "response", None) is not None:
            return {}  # it is no name, or the hub knows nothing of it: loading says that best
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return {"local_files_only": True}
        raise ConfigError(
            f"{what} is no folder here and is not among the models that were downloaded earlier, "
            f"and the hub cannot be reached ({type(exc).__name__}: {exc}): check the name and the "
            "connection, or name a folder"
        ) from exc
    return {}


def load_weights(model: nn.Module, folder: Path) -> None:
    """Loads a checkpoint's weights; raises if they are of another model."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no weights: has the run saved a checkpoint yet?")
    try:
        state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except SafetensorError as exc:
        raise ConfigError(f"the weights in {folder} are damaged: {exc}") from exc
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, state)
        return
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        names = [*unexpected, *(set(missing) - tied)]
        raise ConfigError(f"{folder} comes from another model: {names[0]!r} does not fit")


def from_pretrained(section: ModelSection, name: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"revision": section.revision} if section.revision else {}
    options |= where_from(name, section.revision, f"model.name={name!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        options |= section.kwargs
        with no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    except (OSError, ValueError) as exc:
        reason = shorten(str(exc), 600, placeholder=" …")  # some list every model there is
        raise ConfigError(
            f'model.name={name!r} is neither "tiny" nor a run folder, nor a model that can be '
            f"loaded from a folder or the hub: {reason}"
        ) from exc
    except SafetensorError as exc:
        raise ConfigError(
            f"model.name={name!r}: its weights are damaged or cut ({exc}): copy or download them "
            "again"
        ) from exc
    except TypeError as exc:
        raise ConfigError(
            f"model.kwargs does not fit {name!r}: {_misfit(section, name, exc)}"
        ) from exc
    return model, tokenizer


def _misfit(section: ModelSection, name: str, error: TypeError) -> str:
    from transformers import AutoConfig

    names = sorted(AutoConfig.from_pretrained(name).to_dict())
    unknown = [key for key in section.kwargs if key not in names and key in str(error)]
    return unknown_argument(unknown[0], names) if unknown else str(error)


def with_adapter(model: nn.Module, section: ModelSection, seed: int) -> nn.Module:
    peft = load_package("peft", "peft")
    assert section.lora is not None
    adapter = peft.LoraConfig(
        r=section.lora.rank,
        lora_alpha=section.lora.alpha,
        target_modules=section.lora.target_modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    # Its weights are drawn from torch's global state: fork it, so that nobody else's changes.
    with configuring("model.lora"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # In the module's own type: float32 masters are the optimizer's, as for any other weight.
        wrapped: nn.Module = peft.get_peft_model(model, adapter, autocast_adapter_dtype=False)
        return wrapped
