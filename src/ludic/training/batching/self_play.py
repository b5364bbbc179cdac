"""Self-play: a policy that plays against itself and a pool of its past versions.

`SelfPlay` decides which policy takes which seat; `PastPolicies` holds the earlier weights and
samples from them. A name connects the two: the policy in slot 0 of the pool plays a seat with the
client "past-0".
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Self

import torch
from msgspec import structs
from torch import nn

from ludic.errors import CheckpointError, ConfigError
from ludic.interaction import Runtime
from ludic.plumbing.files import replacing
from ludic.rollouts import RolloutRequest
from ludic.rollouts.requests import seeded
from ludic.seeding import derive_seed
from ludic.types import AgentID, ProtocolSpec, Rollout

OPPONENT = "opponent"
"""The key in the `meta` of a request and its rollouts that says which past policy had the other
seat."""


def past_name(slot: int) -> str:
    """The name by which a protocol finds the past policy in `slot`."""
    return f"past-{slot}"


class SelfPlay:
    """A curriculum for an environment with several agents, all of them played by the policy.

    Once there is a past policy, it takes one seat in `past_share` of the episodes; the seed
    determines which policy and which seat. That seat produces no rollout and is not trained on.
    `slots` names the past policies; whoever refreshes the pool sets it.
    """

    def __init__(
        self,
        request: RolloutRequest,
        seats: Sequence[AgentID],
        *,
        past_share: float = 0.5,
        seed: int = 0,
    ) -> None:
        if len(seats) < 2:
            raise ConfigError(
                f"self-play needs an environment with several agents; {request.env.kind!r} has "
                f"{list(seats)}"
            )
        if not 0 <= past_share <= 1:
            raise ConfigError(f"SelfPlay(past_share={past_share}): must be in [0, 1]")
        self._request, self._seats = request, tuple(seats)
        self._past_share, self._seed = past_share, seed
        self._given = 0
        self.slots: Sequence[str] = ()
        """What each slot holds, such as "step-20"; with an empty pool there is only self-play."""

    def next_requests(self, count: int) -> list[RolloutRequest]:
        return [self._next() for _ in range(count)]

    def _next(self) -> RolloutRequest:
        number = self._given
        self._given += 1
        request = seeded(self._request, "self-play", number, self._seed)
        rng = Random(derive_seed(self._seed, "seating", number))
        # All three are drawn every time, so that no draw depends on the others.
        draw, seat, slot = rng.random(), rng.randrange(len(self._seats)), rng.random()
        if not self.slots or draw >= self._past_share:
            return request
        taken = int(slot * len(self.slots))
        kwargs = dict(request.protocol.kwargs)
        seats = kwargs.get("seats", {})
        own = seats.get(self._seats[seat], {})  # its parser and prompt are its player's, too
        opponent = {} if "bot" in own else {k: v for k, v in own.items() if k != "collect"}
        opponent["client"] = past_name(taken)
        kwargs["seats"] = {**seats, self._seats[seat]: opponent}
        return structs.replace(
            request,
            protocol=ProtocolSpec(request.protocol.kind, kwargs),
            meta={**request.meta, OPPONENT: self.slots[taken]},
        )

    def report(self, rollouts: Sequence[Rollout]) -> None:
        """Does nothing: who sits where does not depend on who wins."""

    def state_dict(self) -> Mapping[str, Any]:
        return {"given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._given = int(state["given"])


class PastPolicies:
    """The newest `size` snapshots of a model, taken every `every` steps. Each is a separate copy
    that is sampled from in this process.

    What it holds at a step depends only on the step. The trained weights of every snapshot are in
    `folder`/step-N, so that a resumed run meets the same opponents as one that was never
    interrupted. It needs memory for `size` more copies of the model. `client_options` go to the
    `LocalChatClient` of each.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        tokenizer: Any,
        folder: str | Path,
        *,
        size: int,
        every: int,
        **client_options: Any,
    ) -> None:
        if size < 1 or every < 1:
            raise ConfigError(f"PastPolicies(size={size}, every={every}): both must be >= 1")
        from ludic.inference import LocalChatClient

        self._model, self._folder = model, Path(folder)
        self._size, self._every = size, every
        self._copies = [copy.deepcopy(model).eval() for _ in range(size)]
        self._clients = [
            LocalChatClient(module, tokenizer, **client_options) for module in self._copies
        ]
        self._holds: list[int | None] = [None] * size
        self.runtimes: Mapping[str, Runtime] = {
            past_name(slot): replace(runtime, client=client, model=past_name(slot), others={})
            for slot, client in enumerate(self._clients)
        }
        """For `Runtime.others`: the past policies by name."""

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        for client in self._clients:
            await self._stack.enter_async_context(client)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def bring_to(self, step: int) -> list[str]:
        """Sets the pool to its state at `step`, before that step is sampled, and returns what each
        slot holds. If a snapshot is due at this step, the current model becomes one."""
        newest = step // self._every
        if step == newest * self._every:
            self._write(step)
        wanted = range(max(0, newest - self._size + 1), newest + 1)
        for number in wanted:
            await self._load(number % self._size, number * self._every)
        return [f"step-{held}" for held in self._holds if held is not None]

    def next_due(self, step: int) -> int:
        """The first step after `step` at which a snapshot is due."""
        return (step // self._every + 1) * self._every

    def _file(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}" / "weights.safetensors"

    def _write(self, step: int) -> None:
        from safetensors.torch import save_file

        path = self._file(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The weights that training changes: all of them, or the adapter's.
        trained = {
            name: parameter.detach().to("cpu", copy=True).contiguous()
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }
        with replacing(path) as temporary:
            save_file(trained, temporary)

    async def _load(self, slot: int, step: int) -> None:
        if self._holds[slot] == step:
            return
        from safetensors.torch import load_file

        path = self._file(step)
        try:
            weights = load_file(path)
        except (OSError, ValueError) as exc:
            raise CheckpointError(
                f"the past policy of step {step} cannot be read from {path}: {exc}; a run can only "
                "go on with the opponents it had"
            ) from exc
        mine = {n: p for n, p in self._copies[slot].named_parameters() if n in weights}
        if mine.keys() != weights.keys():
            raise CheckpointError(f"{path} holds the weights of another model")
        async with self._clients[slot].updating(version=step):
            with torch.no_grad():
                for name, parameter in mine.items():
                    parameter.copy_(weights[name])
        self._holds[slot] = step
