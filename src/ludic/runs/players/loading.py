"""A run's other models: loaded here, or behind a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from ludic.errors import ConfigError
from ludic.inference import VLLMChatClient
from ludic.plumbing.arguments import nearest
from ludic.plumbing.given import is_given
from ludic.runs.model import build_model, check_device, precision_of
from ludic.runs.settings import ModelSection, OtherModelSection, RunConfig
from ludic.runs.settings.paths import earlier_run
from ludic.runs.settings.servers import read_key
from ludic.runs.storage.folder import RunFolder


def check_other(section: OtherModelSection, where: str) -> None:
    """Raises if a model, or the key to a server, is seen not to be there without loading it."""
    if section.server is not None:
        read_key(section, where)
        return
    name = section.model or ""
    if section.device is not None:
        check_device(ModelSection(device=section.device))
    if is_given(name) or name in ("tiny", "start"):
        return
    if (earlier := earlier_run(name)) is not None:
        path, which = earlier
        try:
            RunFolder.open(path).weights(which)
        except ConfigError as exc:
            raise ConfigError(f"{where}.model={name!r}: {exc}") from exc
        return
    folder = Path(name)
    if folder.is_absolute() and not os.path.isdir(folder):
        there = os.path.isdir(folder.parent)
        beside = [p.name for p in folder.parent.glob("*")] if there else []
        raise ConfigError(
            f"{where}.model={name!r}: there is no such folder{nearest(folder.name, beside)}"
        )


def load_other(config: RunConfig, section: OtherModelSection, where: str) -> tuple[nn.Module, Any]:
    """Returns another model and its tokenizer, in the run's precision and frozen."""
    other = ModelSection(
        name=section.model or "",
        revision=section.revision,
        device=section.device or config.model.device,
        precision=None if is_given(section.model) else precision_of(config),
        kwargs=section.kwargs,
    )
    try:
        model, tokenizer = build_model(config.model_copy(update={"model": other}))
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc
    return model.eval().requires_grad_(False), tokenizer


def check_vocabulary(own: Any, other: Any, where: str) -> None:
    """Raises if another model's tokenizer does not give the run's tokens the same ids."""
    theirs = other.get_vocab()
    for token, number in own.get_vocab().items():
        if theirs.get(token) != number:
            raise ConfigError(
                f"{where} has another tokenizer than the run's model (token {token!r} is {number} "
                f"here and {theirs.get(token, 'not there')} there), so it cannot score its tokens: "
                "choose a model of the same family"
            )


def client_of(section: OtherModelSection, where: str) -> VLLMChatClient:
    """Returns a client of a vLLM server that only samples and scores."""
    assert section.server is not None
    return VLLMChatClient(
        section.server, model=section.served_name, api_key=read_key(section, where)
    )


def served_name(section: OtherModelSection, client: VLLMChatClient) -> str:
    """Returns what a connected server calls its model."""
    facts = client.replicas[0].facts
    return section.served_name or (facts.models[0] if facts is not None else "")
