"""Running a policy over held-out episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from ludic.eval.report import EpisodeResult, EvalReport, Headline, Success, headline_of
from ludic.rollouts import RolloutEngine, RolloutRequest
from ludic.rollouts.engine import Progress, ProgressCallback
from ludic.seeding import derive_seed
from ludic.types import Rollout

if TYPE_CHECKING:
    from rich.console import Console


class Evaluator(Protocol):
    """Anything that can say how good the current policy is. A trainer may call it between
    steps; it must not change the policy."""

    async def evaluate(self) -> EvalReport: ...


def eval_requests(
    template: RolloutRequest, episodes: int, *, seed: int, samples_per_task: int = 1
) -> list[RolloutRequest]:
    """Returns `episodes` requests like `template` with their own seeds, disjoint from all training
    seeds. Samples of one task share the environment's seed."""
    return [
        structs.replace(
            template,
            env_seed=derive_seed(seed, "eval", "env", i // samples_per_task),
            sampling_seed=derive_seed(seed, "eval", "sampling", i),
            num_episodes=1,
        )
        for i in range(episodes)
    ]


@dataclass(frozen=True)
class RolloutEvaluator:
    """Plays the requests and reports. `agent_id` picks the seat to judge in a game of several;
    None judges every seat that was played. Sub-agents are not judged. `outcomes` are the endings to
    report, the one that counts first. An episode succeeds by `success`, or else if it ends with the
    outcome that counts; without `outcomes`, that is each environment's own.
    """

    engine: RolloutEngine
    requests: Sequence[RolloutRequest]
    max_steps: int
    name: str = "eval"
    concurrency: int = 64
    success: Success | None = None
    agent_id: str | None = None
    on_progress: ProgressCallback | None = None
    outcomes: Sequence[str] = ()

    async def evaluate(self) -> EvalReport:
        rollouts: list[Rollout] = await self.engine.generate_rollouts(
            self.requests,
            max_steps=self.max_steps,
            concurrency=self.concurrency,
            on_progress=self.on_progress,
        )
        judged = _seated([r for r in rollouts if r.parent_id is None], self.agent_id)
        results = tuple(EpisodeResult.of(r, self.success) for r in judged)
        if self.success is not None:
            return EvalReport(self.name, results, tuple(self.outcomes), _wording(self.success))
        report = EvalReport(self.name, results, tuple(self.outcomes))
        parts = report.envs() or dict.fromkeys({e.env or "" for e in results}, report)
        leads = {env: headline_of([part]) for env, part in parts.items()}
        return replace(report, episodes=tuple(_by_ending(e, leads[e.env or ""]) for e in results))


def _by_ending(episode: EpisodeResult, lead: Headline) -> EpisodeResult:
    """The result, with its success by the ending that counts in its environment, if any does."""
    if lead.kind != "outcome":
        return episode
    return replace(episode, success=not episode.error and bool(lead.value(episode)))


def _wording(success: Success) -> str:
    """Says what success is; a test of the caller's own has only its name."""
    name = getattr(success, "__name__", None)
    return str(success) if name is None else f"by {name}"


def _seated(rollouts: Sequence[Rollout], agent_id: str | None) -> list[Rollout]:
    """Returns the rollouts of one seat, or of all. An episode that failed before anybody was seated
    counts as a failure of every seat that its environment has in other episodes."""
    present = Counter(rollout.episode_id for rollout in rollouts)
    seats: dict[str, dict[str, None]] = {}
    for rollout in rollouts:
        if rollout.steps:
            seats.setdefault(str(rollout.env), {})[rollout.agent_id] = None
    judged: list[Rollout] = []
    for rollout in rollouts:
        seats_there = seats.get(str(rollout.env), {})
        unseated = present[rollout.episode_id] == 1 and rollout.error and not rollout.steps
        if unseated and rollout.agent_id not in seats_there:
            taken = [agent_id] if agent_id is not None else seats_there or [rollout.agent_id]
            judged += [structs.replace(rollout, agent_id=seat) for seat in taken]
        elif agent_id in (None, rollout.agent_id):
            judged.append(rollout)
    return judged


async def run_eval(
    engine: RolloutEngine,
    request: RolloutRequest,
    *,
    episodes: int,
    max_steps: int,
    seed: int = 0,
    samples_per_task: int = 1,
    concurrency: int = 64,
    name: str = "eval",
    success: Success | None = None,
    agent_id: str | None = None,
    on_progress: ProgressCallback | None = None,
    outcomes: Sequence[str] = (),
) -> EvalReport:
    """Evaluates on `episodes` held-out episodes of `request`'s environment, with a progress bar on
    the standard error unless `on_progress` is given; `success` and `outcomes` are as for
    `RolloutEvaluator`."""
    requests = eval_requests(request, episodes, seed=seed, samples_per_task=samples_per_task)
    with episodes_bar(name) if on_progress is None else nullcontext(on_progress) as update:
        return await RolloutEvaluator(
            engine=engine,
            requests=requests,
            max_steps=max_steps,
            name=name,
            concurrency=concurrency,
            success=success,
            agent_id=agent_id,
            on_progress=update,
            outcomes=outcomes,
        ).evaluate()


@contextmanager
def episodes_bar(title: str, console: Console | None = None) -> Iterator[ProgressCallback]:
    """Shows a progress bar over episodes, for `on_progress`; without a terminal, one line at the
    end. On the standard error unless there is a `console`: results go to the standard output."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    shown = Console(stderr=True) if console is None else console
    with Bar(*columns, TimeElapsedColumn(), console=shown) as bar:
        task = bar.add_task(title, total=None)

        def update(progress: Progress) -> None:
            bar.update(task, total=progress.total, completed=progress.finished)

        yield update
