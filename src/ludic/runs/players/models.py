"""A run's other models, loaded here or behind a server, and those of them that take a seat."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch import nn

from ludic.errors import ConfigError, nearest
from ludic.inference import (
    HFChatTemplate,
    InferenceSpec,
    OpenAIChatClient,
    ReturnSpec,
    VLLMChatClient,
)
from ludic.inference.client import ChatClient
from ludic.interaction import Runtime
from ludic.plumbing.given import is_given
from ludic.runs.episodes import inference_spec
from ludic.runs.model import build_model, check_device, local_client, precision_of
from ludic.runs.pretrained import load_tokenizer
from ludic.runs.settings import ModelSection, OtherModelSection, PlayerSection, RunConfig
from ludic.runs.settings.base import read_key
from ludic.runs.settings.paths import earlier_run
from ludic.runs.storage import RunFolder
from ludic.training.batching.self_play import past_name


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
        has_parent = os.path.isdir(folder.parent)
        beside = [p.name for p in folder.parent.glob("*")] if has_parent else []
        raise ConfigError(
            f"{where}.model={name!r}: there is no such folder{nearest(folder.name, beside)}"
        )


def as_model(config: RunConfig, section: OtherModelSection) -> ModelSection:
    """Returns the table that a run of another model alone would have, in this run's precision."""
    return ModelSection(
        name=section.model or "",
        revision=section.revision,
        device=section.device or config.model.device,
        precision=None if is_given(section.model) else precision_of(config),
        kwargs=section.kwargs,
    )


def load_other(config: RunConfig, section: OtherModelSection, where: str) -> tuple[nn.Module, Any]:
    """Returns another model and its tokenizer, in the run's precision and frozen."""
    other = config.model_copy(update={"model": as_model(config, section)})
    try:
        model, tokenizer = build_model(other)
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
                f"here and {theirs.get(token, 'missing')} there), so it cannot score its tokens: "
                "choose a model of the same family"
            )


def client_of(section: OtherModelSection, where: str) -> VLLMChatClient:
    """Returns a client of a vLLM server that only samples and scores."""
    assert section.server is not None
    return VLLMChatClient(
        section.server, model=section.served_name, api_key=read_key(section, where)
    )


@asynccontextmanager
async def opened(clients: Iterable[tuple[Any, Any]]) -> AsyncIterator[None]:
    """Connects the clients of servers, each with a tokenizer, and closes every client at the end.
    Without a name for a server's model, the first that it has is meant."""
    async with AsyncExitStack() as stack:
        for client, tokenizer in clients:
            await stack.enter_async_context(client)
            if isinstance(client, VLLMChatClient):
                await client.connect(tokenizer=tokenizer)
                if client.model is None and (facts := client.replicas[0].facts) is not None:
                    client.model = facts.models[0]
        yield


class OtherPlayers:
    """A run's other players by name, for `Runtime.others`. While `opened`, they can be asked."""

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        inference = inference_spec(config, trained_on=False)
        self._clients: list[tuple[Any, Any]] = []
        self.runtimes: dict[str, Runtime] = {
            player.name: self._runtime(config, player, tokenizer, inference)
            for player in config.player
        }

    def _runtime(
        self, config: RunConfig, player: PlayerSection, tokenizer: Any, inference: InferenceSpec
    ) -> Runtime:
        where = f"player {player.name!r}"
        client: ChatClient
        if player.server is None:
            model, tokenizer = load_other(config, player, where)
            client = local_client(config, model, tokenizer)
        else:
            if player.tokenizer is not None:
                tokenizer = load_tokenizer(player.tokenizer, where)
            client = self._server(player, tokenizer, where)
        self._clients.append((client, tokenizer))
        return Runtime(
            client,
            HFChatTemplate(tokenizer),
            player.served_name or player.name,
            sampling_of(player, inference),
        )

    def _server(self, player: PlayerSection, tokenizer: Any, where: str) -> ChatClient:
        assert player.server is not None
        if player.api == "vllm":
            return client_of(player, where)
        return OpenAIChatClient(
            player.server,
            api_key=read_key(player, where),
            chat_template=HFChatTemplate(tokenizer),
            prompts="text",
        )

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Connects to the servers, and closes every client at the end."""
        return opened(self._clients)


def sampling_of(player: PlayerSection, inference: InferenceSpec) -> InferenceSpec:
    """Returns how a player is sampled from: as the run says, or as its table does."""
    overrides = player.model_dump(include={"temperature", "max_tokens"}, exclude_none=True)
    returns = ReturnSpec(logprobs=player.api == "vllm")
    return replace(inference, sampling=replace(inference.sampling, **overrides), returns=returns)


def check_players(config: RunConfig) -> None:
    """Raises if a player has no name for itself, or is seen not to be there."""
    names: set[str] = set()
    past = {past_name(slot) for slot in range(config.training.past_opponents)}
    for player in config.player:
        if player.name in names | past:
            raise ConfigError(f"two players are called {player.name!r}: give each its own name")
        names.add(player.name)
        if player.model == "start":
            raise ConfigError(
                f'player {player.name!r}: model = "start" is for a [reference]; to play against '
                "earlier policies set training.past_opponents"
            )
        check_other(player, f"player {player.name!r}")
    seated = set(_clients_in(config.protocol.kwargs))
    if config.eval.protocol is not None:
        seated |= set(_clients_in(config.eval.protocol.kwargs))
    if unused := names - seated:
        raise ConfigError(
            f"player {min(unused)!r} has no seat: name it in one, as in "
            f'protocol.kwargs.seats.X = {{ client = "{min(unused)}" }}'
        )


def _clients_in(kwargs: Mapping[str, Any]) -> list[str]:
    names = [kwargs["client"]] if isinstance(kwargs.get("client"), str) else []
    for key in ("seats", "sub_agents"):
        for seat in (kwargs.get(key) or {}).values():
            names += _clients_in(seat)
    return names
