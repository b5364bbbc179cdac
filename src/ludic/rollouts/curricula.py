"""Curricula that go by how the earlier requests went: one stage after another, or by task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from ludic.errors import CheckpointError, ConfigError
from ludic.rollouts.requests import LABEL, Curriculum, RolloutRequest, check_names, seeded
from ludic.saw.statistics import STAGE
from ludic.seeding import derive_seed
from ludic.types import Rollout


def is_solved(rollout: Rollout, threshold: float) -> bool:
    """Whether the rollout's total reward reaches `threshold`."""
    return rollout.error is None and rollout.total_reward >= threshold


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a curriculum and when it is over: after `episodes` finished ones, or once
    `solve_rate` of the last `window` reached `threshold`; whichever comes first. The last stage
    needs neither."""

    curriculum: Curriculum
    episodes: int | None = None
    solve_rate: float | None = None
    window: int = 64
    threshold: float = 1.0


class Stages:
    """One curriculum after another, each until its stage is over."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        if not stages:
            raise ConfigError("Stages: give at least one stage")
        for number, stage in enumerate(stages[:-1]):
            if stage.episodes is None and stage.solve_rate is None:
                raise ConfigError(
                    f"Stages: stage {number} never ends: set its `episodes` or its `solve_rate`"
                )
        self._stages = tuple(stages)
        self._at = 0
        self._episodes = 0
        self._recent: list[bool] = []

    @property
    def stage(self) -> int:
        """The number of the stage that the next requests come from."""
        return self._at

    def next_requests(self, count: int) -> list[RolloutRequest]:
        requests = self._stages[self._at].curriculum.next_requests(count)
        return [replace(r, meta={**r.meta, STAGE: self._at}) for r in requests]

    def report(self, rollouts: Sequence[Rollout]) -> None:
        stage = self._stages[self._at]
        mine = [r for r in rollouts if r.meta.get(STAGE) == self._at]
        stage.curriculum.report(mine)
        mine = [r for r in mine if r.error is None]
        self._episodes += len({r.episode_id for r in mine})
        self._recent.extend(is_solved(r, stage.threshold) for r in mine)
        del self._recent[: -stage.window]
        if self._at + 1 < len(self._stages) and self._is_over(stage):
            self._at, self._episodes, self._recent = self._at + 1, 0, []

    def _is_over(self, stage: Stage) -> bool:
        if stage.episodes is not None and self._episodes >= stage.episodes:
            return True
        if stage.solve_rate is None or len(self._recent) < stage.window:
            return False
        return sum(self._recent) / len(self._recent) >= stage.solve_rate

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "stage": self._at,
            "episodes": self._episodes,
            "recent": list(self._recent),
            "curricula": [stage.curriculum.state_dict() for stage in self._stages],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["curricula"]) != len(self._stages):
            raise CheckpointError(
                f"the checkpoint has {len(state['curricula'])} stages, this run "
                f"{len(self._stages)}: resume with the stages that the run began with"
            )
        for stage, saved in zip(self._stages, state["curricula"], strict=True):
            stage.curriculum.load_state_dict(saved)
        self._at, self._episodes = int(state["stage"]), int(state["episodes"])
        self._recent = [bool(value) for value in state["recent"]]


class DrawnTasks(ABC):
    """Draws tasks at random, each by its chance, as the seed and the number of the draw decide."""

    def __init__(self, tasks: Mapping[str, RolloutRequest], seed: int) -> None:
        if not tasks:
            raise ConfigError(f"{type(self).__name__}: give at least one task")
        self._tasks = dict(tasks)
        self._seed, self._drawn = seed, 0

    @abstractmethod
    def probabilities(self) -> Mapping[str, float]:
        """How likely each task is to be drawn next."""

    def next_requests(self, count: int) -> list[RolloutRequest]:
        chances = self.probabilities()
        names, weights = list(chances), list(chances.values())
        requests = []
        for number in range(self._drawn, self._drawn + count):
            draw = np.random.default_rng(derive_seed(self._seed, "draw", number))
            name = names[int(draw.choice(len(names), p=weights))]
            requests.append(seeded(self._tasks[name], name, number, self._seed))
        self._drawn += count
        return requests

    def report(self, rollouts: Sequence[Rollout]) -> None:
        """Draws that learn nothing from outcomes."""
        return

    def state_dict(self) -> Mapping[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])


class TargetSolveRate(DrawnTasks):
    """Prefers tasks whose solve rate is near a target: neither hopeless nor done.

    The estimate of a task moves by `learning_rate` towards each outcome and starts at the target,
    so that new tasks are tried. A task is drawn in proportion to
    exp(−½((rate − target)/width)²) + `floor`; the floor lets no task be forgotten.
    """

    def __init__(
        self,
        tasks: Mapping[str, RolloutRequest],
        *,
        target: float = 0.5,
        width: float = 0.2,
        floor: float = 0.05,
        learning_rate: float = 0.1,
        threshold: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(tasks, seed)
        rules = (
            (0 < target < 1, "target", target, "between 0 and 1"),
            (width > 0, "width", width, "> 0"),
            (floor >= 0, "floor", floor, ">= 0"),
            (0 < learning_rate <= 1, "learning_rate", learning_rate, "in (0, 1]"),
        )
        for ok, name, value, must in rules:
            if not ok:
                raise ConfigError(f"TargetSolveRate({name}={value}): must be {must}")
        self._rates = dict.fromkeys(tasks, target)
        self._target, self._width, self._floor = target, width, floor
        self._learning_rate, self._threshold = learning_rate, threshold

    @property
    def solve_rates(self) -> Mapping[str, float]:
        """The estimate of each task."""
        return dict(self._rates)

    def probabilities(self) -> Mapping[str, float]:
        weights = {
            name: math.exp(-0.5 * ((rate - self._target) / self._width) ** 2) + self._floor
            for name, rate in self._rates.items()
        }
        total = math.fsum(weights.values())
        if total == 0:  # without a floor, tasks far from the target can all underflow
            return dict.fromkeys(weights, 1 / len(weights))
        return {name: weight / total for name, weight in weights.items()}

    def report(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            name = rollout.meta.get(LABEL)
            if rollout.error is None and name in self._rates:
                outcome = float(is_solved(rollout, self._threshold))
                self._rates[name] += self._learning_rate * (outcome - self._rates[name])

    def state_dict(self) -> Mapping[str, Any]:
        return {"rates": dict(self._rates), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_names("TargetSolveRate", state["rates"], self._rates)
        self._rates = {name: float(state["rates"][name]) for name in self._rates}
        super().load_state_dict(state)
