"""SPO's curriculum: tasks with the least certain outcome are drawn most often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ludic.errors import ConfigError
from ludic.rollouts.curricula import draw_tasks
from ludic.rollouts.requests import RolloutRequest
from ludic.training.credit_assignment.value_tracker import BetaTracker
from ludic.types import Rollout


class UncertainTasks:
    """Draws tasks ∝ √(v̂(1 − v̂)) + `eps`, where v̂ is the tracker's value of the task.

    A `Curriculum`. Pass it the tracker of `make_spo`, which the algorithm's credit updates. Every
    request has its task's name as `task_key`.
    """

    def __init__(
        self,
        tasks: Mapping[str, RolloutRequest],
        tracker: BetaTracker,
        *,
        eps: float = 0.05,
        seed: int = 0,
    ) -> None:
        if not tasks or not eps > 0:
            raise ConfigError("UncertainTasks: give at least one task, and eps > 0")
        self._tasks = {name: replace(task, task_key=name) for name, task in tasks.items()}
        self._tracker, self._eps, self._seed, self._drawn = tracker, eps, seed, 0

    def probabilities(self) -> Mapping[str, float]:
        """How likely each task is to be drawn next."""
        names = list(self._tasks)
        weights = self._tracker.sampling_weights(names, self._eps)
        return dict(zip(names, weights, strict=True))

    def next_requests(self, count: int) -> list[RolloutRequest]:
        """The next `count` requests."""
        numbers = range(self._drawn, self._drawn + count)
        self._drawn += count
        return draw_tasks(self._tasks, self.probabilities(), numbers, self._seed)

    def report(self, rollouts: Sequence[Rollout]) -> None:
        """Does nothing: the algorithm's credit assigner updates the tracker."""

    def state_dict(self) -> Mapping[str, Any]:
        """How many tasks were drawn; the tracker is saved with the algorithm."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])
