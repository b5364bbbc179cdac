"""Who plays in a run's episodes, and which episodes come next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ludic.errors import ConfigError
from ludic.interaction import Runtime
from ludic.rollouts import Curriculum
from ludic.runs.episodes import requests_of, seats_of
from ludic.runs.model import precision_of
from ludic.runs.players.curriculum import make_curriculum
from ludic.runs.players.models import check_players
from ludic.runs.settings import RunConfig
from ludic.seeding import derive_seed
from ludic.training import RLAlgorithm
from ludic.training.batching.self_play import PastPolicies, SelfPlay


@dataclass(frozen=True)
class Seating:
    """Which episodes to play, and with whom: the policy alone, or a pool of its past versions too,
    which is entered to be sampled from."""

    runtime: Runtime
    curriculum: Curriculum
    pool: PastPolicies | None = None

    @staticmethod
    def of(
        config: RunConfig,
        runtime: Runtime,
        algorithm: RLAlgorithm,
        model: nn.Module,
        tokenizer: Any,
        pool_folder: Path,
    ) -> Seating:
        """Returns the run's players. Past policies are kept in `pool_folder`."""
        training = config.training
        if not training.past_opponents:
            return Seating(runtime, make_curriculum(config, algorithm, seed=_seed(config)))
        pool = PastPolicies(
            model,
            runtime,
            tokenizer,
            pool_folder,
            size=training.past_opponents,
            every=training.checkpoint_every,
            max_slots=config.slots,
            max_context_tokens=config.inference.max_context_tokens,
            deterministic=config.inference.deterministic,
            precision=precision_of(config),
        )
        everyone = replace(runtime, others={**runtime.others, **pool.runtimes})
        return Seating(everyone, _self_play(config), pool)


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
