"""SPO's value tracker: the expected return of each task, from all of its outcomes so far.

Each task has a Beta distribution over its reward in [0, 1], which forgets old outcomes at a rate λ,
because the policy that produced them has changed. NumPy only; the state is JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from msgspec import structs

from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import CheckpointError, ConfigError, CreditError
from ludic.rollouts.curricula import DrawnTasks
from ludic.rollouts.requests import RolloutRequest
from ludic.saw.statistics import ENV
from ludic.training.credit_assignment.returns import Credit, rollout_return, spread
from ludic.types import Rollout


@dataclass(frozen=True, slots=True)
class DriftForgetting:
    """λ = 2^(−D / `half_life`), held in [`lower`, `upper`]: D is how far the policy has drifted
    (in KL per token) since the task was last seen, as told to `BetaTracker.observe_drift`."""

    half_life: float = 0.06
    lower: float = 0.875
    upper: float = 0.96

    def __post_init__(self) -> None:
        if not (self.half_life > 0 and 0 <= self.lower <= self.upper <= 1):
            raise ConfigError(f"{self}: needs half_life > 0 and 0 <= lower <= upper <= 1")

    def rate(self, drift: float) -> float:
        """λ for a task that the policy has drifted by `drift` from."""
        return min(max(math.exp2(-drift / self.half_life), self.lower), self.upper)


def forgetting_of(value: float | DriftForgetting | Mapping[str, float]) -> float | DriftForgetting:
    """λ, or how it follows the drift: also as a run file says it, as a table."""
    if not isinstance(value, Mapping):
        return value
    try:
        return DriftForgetting(**value)
    except TypeError as exc:
        known = ", ".join(f.name for f in fields(DriftForgetting))
        raise ConfigError(f"forgetting={dict(value)}: a table of {known} ({exc})") from exc


@dataclass(slots=True)
class _Belief:
    alpha: float
    beta: float
    drift_seen: float


@dataclass(slots=True)
class BetaTracker:
    """v̂ = α / (α + β) for each task; α ← λα + r, β ← λβ + 1 − r.

    `forgetting` is a constant λ in (0, 1] or a `DriftForgetting`. A task not seen before has
    v̂ = `prior_value`, worth `prior_count` outcomes. Several outcomes of a task in one update are
    added together and forget once, so that their order does not matter.
    """

    forgetting: float | DriftForgetting = 0.9
    prior_value: float = 0.5
    prior_count: float = 8.0
    _beliefs: dict[str, _Belief] = field(default_factory=dict)
    _drift: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.forgetting, (int, float)) and not 0 < self.forgetting <= 1:
            raise ConfigError(f"BetaTracker.forgetting={self.forgetting!r}: must be in (0, 1]")
        if not (0 <= self.prior_value <= 1 and self.prior_count > 0):
            raise ConfigError("BetaTracker: prior_value in [0, 1] and prior_count > 0")

    def value(self, task_key: str) -> float:
        """v̂: the expected reward of the task."""
        belief = self._beliefs.get(task_key)
        return self.prior_value if belief is None else belief.alpha / (belief.alpha + belief.beta)

    def update(self, outcomes: Iterable[tuple[str, float]]) -> None:
        """Takes in (task key, reward in [0, 1]) pairs that came from one batch."""
        rewards: dict[str, list[float]] = {}
        for task_key, reward in outcomes:
            if not 0 <= reward <= 1:
                raise CreditError(
                    f"task {task_key!r}: a reward of {reward}, but the tracker takes [0, 1]: "
                    "rescale the rewards, or use another algorithm"
                )
            rewards.setdefault(task_key, []).append(reward)
        for task_key, rewards_here in rewards.items():
            belief = self._belief(task_key)
            rate = self._rate(belief)
            total = math.fsum(rewards_here)
            belief.alpha = rate * belief.alpha + total
            belief.beta = rate * belief.beta + len(rewards_here) - total
            belief.drift_seen = self._drift

    def observe_drift(self, kl: float) -> None:
        """Adds the KL of the last policy update, for a `DriftForgetting`."""
        if not (math.isfinite(kl) and kl >= 0):
            raise ConfigError(f"observe_drift({kl}): a KL is finite and >= 0")
        self._drift += kl

    def sampling_weights(self, task_keys: Sequence[str], eps: float = 0.05) -> list[float]:
        """√(v̂(1 − v̂)) + `eps` for each task, normalised to probabilities: the tasks whose outcome
        is least certain come most often."""
        if not task_keys:
            return []
        raw = [math.sqrt(v * (1 - v)) + eps for v in map(self.value, task_keys)]
        total = math.fsum(raw)
        return [weight / total for weight in raw]

    def state_dict(self) -> Mapping[str, Any]:
        """Every task's α, β and drift, as JSON."""
        return {
            "drift": self._drift,
            "tasks": {k: [b.alpha, b.beta, b.drift_seen] for k, b in self._beliefs.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        try:
            beliefs = {str(k): _Belief(*map(float, v)) for k, v in state["tasks"].items()}
            drift = float(state["drift"])
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise CheckpointError(f"not the state of a BetaTracker: {exc!r}") from exc
        self._beliefs, self._drift = beliefs, drift

    def _belief(self, task_key: str) -> _Belief:
        if task_key not in self._beliefs:
            count, value = self.prior_count, self.prior_value
            self._beliefs[task_key] = _Belief(count * value, count * (1 - value), self._drift)
        return self._beliefs[task_key]

    def _rate(self, belief: _Belief) -> float:
        if isinstance(self.forgetting, DriftForgetting):
            return self.forgetting.rate(self._drift - belief.drift_seen)
        return self.forgetting


@dataclass(slots=True)
class TrackedAdvantage:
    """r − v̂ of the rollout's `task_key` in its environment (`meta["env"]`, where a run has
    several), normalised over the batch: (A − mean) / (std + `eps`). Where a task has several seats,
    each has a value of its own; that of the task, over all of them, is for the curriculum.

    r is the return, with the interval `returns` mapped to [0, 1]; one outside of it is a
    `CreditError`. v̂ is the tracker's value before this batch, which is then taken in: so `compute`
    is to be called once per batch. A batch of one rollout is not normalised.
    """

    tracker: BetaTracker = field(default_factory=BetaTracker)
    normalize: bool = True
    eps: float = 1e-4
    returns: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        bounds = tuple(self.returns)
        if not (len(bounds) == 2 and all(map(math.isfinite, bounds)) and bounds[0] < bounds[1]):
            raise ConfigError(
                f"returns={self.returns!r}: two finite numbers, the lowest and the highest return"
            )
        self.returns = bounds

    def compute(self, rollouts: Sequence[Rollout]) -> Credit:
        seats: list[tuple[str, float]] = []
        tasks: list[tuple[str, float]] = []
        for rollout in rollouts:
            if rollout.task_key is None:
                raise CreditError(
                    f"rollout {rollout.id!r} has no task_key, by which its value is tracked: set "
                    "RolloutRequest.task_key"
                )
            task, reward = _name(rollout.task_key, rollout.meta), self._mapped(rollout)
            alone = rollout.agent_id == SingleAgentEnv.agent_id
            seats.append((task if alone else f"{task}/{rollout.agent_id}", reward))
            tasks += [] if alone else [(task, reward)]
        advantages = [reward - self.tracker.value(seat) for seat, reward in seats]
        self.tracker.update(seats + tasks)
        if self.normalize and len(advantages) > 1:
            mean = math.fsum(advantages) / len(advantages)
            squares = math.fsum((a - mean) ** 2 for a in advantages)
            std = math.sqrt(squares / (len(advantages) - 1))
            advantages = [(a - mean) / (std + self.eps) for a in advantages]
        return spread(rollouts, advantages)

    def _mapped(self, rollout: Rollout) -> float:
        """The return's place between the lowest and the highest, which rounding may not leave."""
        (low, high), total = self.returns, rollout_return(rollout)
        place = (total - low) / (high - low)
        if not -1e-9 <= place <= 1 + 1e-9:
            raise CreditError(
                f"rollout {rollout.id!r} has a return of {total:g}, outside [{low:g}, {high:g}], "
                "in which its value is tracked: set make_spo(returns=(low, high)), in a run "
                "file algorithm.kwargs.returns, to the lowest and highest possible return"
            )
        return min(max(place, 0.0), 1.0)

    @property
    def watches_drift(self) -> bool:
        """Whether the trainer should measure every update, for `observe_drift`."""
        return isinstance(self.tracker.forgetting, DriftForgetting)

    def observe_drift(self, kl: float) -> None:
        self.tracker.observe_drift(kl)

    def state_dict(self) -> Mapping[str, Any]:
        return self.tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tracker.load_state_dict(state)


def _name(task_key: str, meta: Mapping[str, Any]) -> str:
    """The task among those of all environments, two of which may give theirs the same names."""
    return f"{meta[ENV]}/{task_key}" if ENV in meta else task_key


class UncertainTasks(DrawnTasks):
    """SPO's curriculum: draws tasks ∝ √(v̂(1 − v̂)) + `eps`, where v̂ is the tracker's value of the
    task, so that those with the least certain outcome come most often.

    Pass it the tracker of `make_spo`, which the algorithm's credit updates and saves. Every request
    has its task's name as `task_key`.
    """

    def __init__(
        self,
        tasks: Mapping[str, RolloutRequest],
        tracker: BetaTracker,
        *,
        eps: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__(
            {name: structs.replace(t, task_key=name) for name, t in tasks.items()}, seed
        )
        if not eps > 0:
            raise ConfigError(f"UncertainTasks(eps={eps}): must be > 0")
        self._tracker, self._eps = tracker, eps

    def probabilities(self) -> Mapping[str, float]:
        tracked = [_name(name, request.meta) for name, request in self._tasks.items()]
        weights = self._tracker.sampling_weights(tracked, self._eps)
        return dict(zip(self._tasks, weights, strict=True))
