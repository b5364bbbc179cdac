"""Who plays in a run's episodes: the policy alone, or its past versions too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from torch import nn

from ludic.errors import ConfigError
from ludic.interaction import Runtime
from ludic.rollouts import Curriculum
from ludic.runs.execution.needs import seats_of
from ludic.runs.model import precision_of
from ludic.runs.players.curriculum import make_curriculum
from ludic.runs.players.seats import check_players
from ludic.runs.requests import requests_of
from ludic.runs.settings import RunConfig
from ludic.seeding import derive_seed
from ludic.training import RLAlgorithm, Trainer
from ludic.training.batching.self_play import PastPolicies, SelfPlay


@dataclass(frozen=True)
class Seating:
    """Which episodes to play, and with whom. Entered, its past policies can be sampled from."""

    runtime: Runtime
    curriculum: Curriculum
    pool: PastPolicies | None = None

    async def __aenter__(self) -> Self:
        if self.pool is not None:
            await self.pool.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.pool is not None:
            await self.pool.__aexit__(*exc)

    async def train(self, trainer: Trainer, steps: int) -> None:
        """Trains up to `steps` in all; a pool of past policies is refreshed on the way."""
        if self.pool is None:
            await trainer.train(steps)
            return
        assert isinstance(self.curriculum, SelfPlay)
        await trainer.start()
        goal = 0
        while goal < steps and trainer.step >= goal:
            # Where a checkpoint has steps already, this only counts them as done.
            if trainer.step < min(due := self.pool.next_due(goal), steps):
                self.curriculum.slots = await self.pool.bring_to(trainer.step)
            await trainer.train(min(due, steps) - goal)
            goal = min(due, steps)


class HasPolicy(Protocol):
    """What a run's players are made from."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def algorithm(self) -> RLAlgorithm: ...


def seating(config: RunConfig, run: HasPolicy, folder: Path) -> Seating:
    """Returns the run's players. Past policies are kept in `folder`/pool."""
    training, runtime = config.training, run.runtime
    if not training.past_opponents:
        curriculum = make_curriculum(config, run.algorithm, seed=_seed(config))
        return Seating(runtime, curriculum)
    pool = PastPolicies(
        run.model,
        runtime,
        run.tokenizer,
        folder / "pool",
        size=training.past_opponents,
        every=training.checkpoint_every,
        max_slots=config.inference.slots,
        max_context_tokens=config.inference.max_context_tokens,
        deterministic=config.inference.deterministic,
        precision=precision_of(config),
    )
    return Seating(
        replace(runtime, others={**runtime.others, **pool.runtimes}), _self_play(config), pool
    )


def check_seating(config: RunConfig, algorithm: RLAlgorithm) -> None:
    """Raises if the run's players or its curriculum do not fit, or if it asks for past opponents
    and its other settings rule them out."""
    check_players(config)
    make_curriculum(config, algorithm, seed=0)
    if config.training.past_opponents:
        _self_play(config)


def _self_play(config: RunConfig) -> SelfPlay:
    requests = requests_of(config)
    request, _ = next(iter(requests.values()))
    if len(requests) > 1:
        raise ConfigError("training.past_opponents works with one environment, not with a mix")
    if not config.training.checkpoint_every:
        raise ConfigError(
            "training.past_opponents takes a past policy at every checkpoint: set "
            "training.checkpoint_every to more than 0"
        )
    if request.protocol.kind != "multi_agent":
        raise ConfigError(
            f"training.past_opponents needs protocol.kind='multi_agent', not "
            f"{request.protocol.kind!r}"
        )
    seats = [str(agent) for agent in seats_of(request.env)]
    return SelfPlay(request, seats, past_share=config.training.past_share, seed=_seed(config))


def _seed(config: RunConfig) -> int:
    return derive_seed(config.run.seed, "train", "env")
