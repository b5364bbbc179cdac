"""The other players of a run: models that take a seat and are not trained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

from msgspec.structs import replace

from ludic.errors import ConfigError
from ludic.inference import (
    HFChatTemplate,
    InferenceSpec,
    OpenAIChatClient,
    ReturnSpec,
    VLLMChatClient,
)
from ludic.inference.client import ChatClient
from ludic.interaction import Runtime
from ludic.runs.model import load_tokenizer, local_client
from ludic.runs.players.loading import check_other, client_of, load_other
from ludic.runs.settings import PlayerSection, RunConfig
from ludic.runs.settings.servers import read_key
from ludic.training.batching.self_play import past_name


class OtherPlayers:
    """A run's other players by name, for `Runtime.others`. Entered, they can be asked."""

    def __init__(self, config: RunConfig, tokenizer: Any, inference: InferenceSpec) -> None:
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

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        try:
            for client, tokenizer in self._clients:
                await self._stack.enter_async_context(client)
                if isinstance(client, VLLMChatClient):
                    await client.connect(tokenizer=tokenizer)
                    if client.model is None and (facts := client.replicas[0].facts) is not None:
                        client.model = facts.models[0]
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()


def sampling_of(player: PlayerSection, inference: InferenceSpec) -> InferenceSpec:
    """Returns how a player is sampled from: as the run says, or as its table does."""
    given = {
        key: value
        for key in ("temperature", "max_tokens")
        if (value := getattr(player, key)) is not None
    }
    returns = ReturnSpec(logprobs=player.api == "vllm")
    return replace(inference, sampling=replace(inference.sampling, **given), returns=returns)


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
    taken = set(_clients_in(config.protocol.kwargs))
    if config.eval.protocol is not None:
        taken |= set(_clients_in(config.eval.protocol.kwargs))
    if unused := names - taken:
        raise ConfigError(
            f"player {min(unused)!r} takes no seat: name it in one, as in "
            f'protocol.kwargs.seats.X = {{ client = "{min(unused)}" }}'
        )


def _clients_in(kwargs: Mapping[str, Any]) -> list[str]:
    found = [kwargs["client"]] if isinstance(kwargs.get("client"), str) else []
    for key in ("seats", "sub_agents"):
        for seat in (kwargs.get(key) or {}).values():
            found += _clients_in(seat)
    return found
