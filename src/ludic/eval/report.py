"""What an evaluation found: one record per agent and episode, figures computed from them, and which
of these leads, wherever they are shown."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import fsum, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ludic.errors import ConfigError, DataError
from ludic.eval.statistics import (
    Estimate,
    PairedComparison,
    compare_paired,
    mean,
    pass_at_k,
    proportion,
)
from ludic.saw.statistics import ENV
from ludic.types import FinishReason, Rollout

Success = Callable[[Rollout], bool]
USUAL = {
    "win": {"loss", "draw", "illegal"},
    "won": {"lost"},
    "right": {"wrong"},
    "correct": {"incorrect"},
    "solved": {"unsolved"},
    "passed": {"failed", "crashed", "no_compile", "no_code", "too_long"},
    "success": {"failure"},
}
"""Names of the ending that counts, for environments of which the run does not say it, with what the
others are called where it counts: where nobody came to it, these tell that it was there."""


@dataclass(frozen=True, slots=True)
class _RewardAbove:
    threshold: float

    def __call__(self, rollout: Rollout) -> bool:
        return rollout.total_reward > self.threshold

    def __str__(self) -> str:
        return f"reward above {self.threshold:g}"


def reward_above(threshold: float = 0.0) -> Success:
    """An episode succeeds when its total reward exceeds `threshold`."""
    return _RewardAbove(threshold)


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One agent's part in an evaluated episode. `outcome` is the environment's own word for the
    ending (`info["result"]` of the agent's last step), where it has one; `success` is None where
    nobody said what it is. Results of the same `episode_id` are of one episode, and so are not
    independent. `env` is the environment, where the run has several."""

    env_seed: int | None
    task_key: str | None
    reward: float
    success: bool | None
    outcome: str | None = None
    turns: int = 0
    tokens: int = 0
    parse_failures: int = 0
    cut_completions: int = 0
    truncation: str | None = None
    error: str | None = None
    agent_id: str = "agent"
    episode_id: str | None = None
    env: str | None = None
    compactions: int = 0

    @staticmethod
    def of(rollout: Rollout, success: Success | None) -> EpisodeResult:
        """Reads a rollout. A failed episode is never a success, whatever its rewards."""
        steps, reward = rollout.env_steps, rollout.total_reward
        if not isfinite(reward):
            raise DataError(
                f"rollout {rollout.id!r}: its rewards add up to {reward}: they must be finite, and "
                "so must their sum; look at the environment's"
            )
        outcome = steps[-1].info.get("result") if steps else None
        reason = rollout.truncation_reason
        return EpisodeResult(
            env_seed=rollout.env_seed,
            task_key=rollout.task_key,
            reward=reward,
            success=None if success is None else rollout.error is None and success(rollout),
            outcome=str(outcome) if outcome is not None else None,
            turns=len({step.turn_index for step in rollout.agent_steps}),
            tokens=rollout.num_tokens,
            parse_failures=sum(bool(step.info.get("parse_error")) for step in steps),
            cut_completions=sum(
                step.finish_reason is FinishReason.LENGTH for step in rollout.agent_steps
            ),
            truncation=reason.value if reason else None,
            error=rollout.error,
            agent_id=rollout.agent_id,
            episode_id=rollout.episode_id or None,
            env=rollout.meta.get(ENV),
            compactions=sum(bool(step.info.get("compacted")) for step in steps),
        )


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The results of one evaluation, one per agent and episode.

    Every rate has all episodes in its denominator: those that failed to parse, were cut, or
    raised are counted as what they are. An episode counts once, as the mean over its agents.
    Intervals and tests see as many observations as there were tasks: samples of one task are alike.

    `outcomes` are the endings that the run names, the one that counts first; `success_is` says what
    success is, where the run or the caller decided that by something else. `older` is a report from
    before all environments named their endings: there, success was any reward above 0.
    """

    name: str
    episodes: tuple[EpisodeResult, ...]
    outcomes: tuple[str, ...] = ()
    success_is: str | None = None
    older: bool = False

    def by_episode(self) -> list[list[EpisodeResult]]:
        """Returns the results of each episode. Old reports have no ids: there, a seed is one."""
        episodes: dict[Any, list[EpisodeResult]] = {}
        for index, result in enumerate(self.episodes):
            seed = index if result.env_seed is None else ("seed", result.env_seed)
            episodes.setdefault(result.episode_id or seed, []).append(result)
        return list(episodes.values())

    def by_role(self) -> dict[str, EvalReport]:
        """Returns a report for each agent, of its results alone."""
        return self._parts(lambda e: e.agent_id)

    def envs(self) -> dict[str, EvalReport]:
        """Returns a report for each environment if there are several, and nothing otherwise."""
        parts = self._parts(lambda e: e.env or "")
        return parts if len(parts) > 1 else {}

    def parts(self) -> dict[str, EvalReport]:
        """Returns the report of each environment and role by name, or this one under no name if
        there is only one of both."""
        parts: dict[str, EvalReport] = {}
        for env, report in (self.envs() or {"": self}).items():
            for role, alone in (report.roles() or {"": report}).items():
                parts[", ".join(filter(None, (env, role)))] = alone
        return parts

    def _parts(self, part: Callable[[EpisodeResult], str]) -> dict[str, EvalReport]:
        episodes: dict[str, list[EpisodeResult]] = {}
        for episode in self.episodes:
            episodes.setdefault(part(episode), []).append(episode)
        return {name: replace(self, episodes=tuple(mine)) for name, mine in episodes.items()}

    @property
    def headline(self) -> Headline:
        """Which figure leads this report."""
        return headline_of([self])

    @property
    def knows_success(self) -> bool:
        """Whether it is known of every episode if it succeeded."""
        return all(e.success is not None for e in self.episodes)

    def per_episode(self, value: Callable[[EpisodeResult], float]) -> list[float]:
        """Returns `value` for each episode, as the mean over its agents."""
        return [_mean(value, results) for results in self.by_episode()]

    def tasks(self) -> list[Hashable]:
        """Returns the task of each episode: its `task_key`, else its seed, else the episode."""
        return [_task(results[0], index) for index, results in enumerate(self.by_episode())]

    @property
    def reward(self) -> Estimate:
        return mean(self.per_episode(lambda e: e.reward), tasks=self.tasks())

    @property
    def success(self) -> Estimate:
        """The share of episodes that succeeded; raises if nobody said what that is."""
        self._check_success("success")
        return self.rate(lambda e: bool(e.success))

    def rate(self, holds: Callable[[EpisodeResult], bool]) -> Estimate:
        """Returns the share of episodes for which `holds`, with its interval."""
        shares = self.per_episode(lambda e: float(bool(holds(e))))
        return mean(shares, tasks=self.tasks(), bounds=(0.0, 1.0))

    def outcome(self, name: str) -> Estimate:
        """Returns the share of episodes that ended with the environment's outcome `name`."""
        return self.rate(lambda e: e.outcome == name)

    def rates(self) -> dict[str, Estimate]:
        """Returns every rate worth a line: success, if it is known, each outcome, and what went
        wrong. Outcomes add up to 1, with `no_outcome` for episodes that ended without one."""
        outcomes = {e.outcome for e in self.episodes if e.outcome is not None}
        named = {f"outcome/{name}": self.outcome(name) for name in sorted(outcomes)}
        if named and any(e.outcome is None for e in self.episodes):
            named["no_outcome"] = self.rate(lambda e: e.outcome is None)
        return {
            **({"success": self.success} if self.knows_success else {}),
            **named,
            "parse_failure": self.rate(lambda e: e.parse_failures > 0),
            "cut_completion": self.rate(lambda e: e.cut_completions > 0),
            "truncated": self.rate(lambda e: e.truncation is not None),
            "error": self.rate(lambda e: e.error is not None),
        }

    def pass_at(self, k: int) -> Estimate:
        """pass@k over tasks, each with an environment's samples that share its `task_key` (else its
        seed). If an episode has several agents, a task counts as the mean over them."""
        self._check_success(f"pass@{k}")
        tasks: dict[Any, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
        for e in self.episodes:
            tasks[e.env, e.task_key or e.env_seed][e.agent_id].append(bool(e.success))
        for (_, task), agents in tasks.items():
            fewest = min(map(len, agents.values()))
            if fewest < k:
                raise ConfigError(
                    f"pass@{k} needs {k} samples of every task; task {task!r} has {fewest}: raise "
                    "the number of samples per task"
                )
        return mean(
            [fmean(pass_at_k(len(w), sum(w), k) for w in a.values()) for a in tasks.values()],
            bounds=(0.0, 1.0),
        )

    def _check_success(self, what: str) -> None:
        if not self.knows_success:
            raise ConfigError(
                f"{what} of {self.name!r} is not known: the environment names no ending that "
                'counts. Let it report one (`info={"result": "right"}`), and name that in '
                "eval.outcomes; or set eval.success_above to a reward; in a script, pass "
                "run_eval(success=…)"
            )

    def metrics(self, prefix: str = "eval/") -> dict[str, float]:
        """Returns plain figures for a logger, the leading one first: of all agents and
        environments, and of each if there are several."""
        lead = self.headline
        flat = {lead.key: lead.of(self).value, "reward": self.reward.value}
        flat["episodes"] = float(len(self.by_episode()))
        flat |= {name: estimate.value for name, estimate in self.rates().items()}
        if "success" in flat:
            flat["accuracy"] = flat["success"]  # by the name that other libraries have for it
        figures = {prefix + name: value for name, value in flat.items()}
        for role, report in self.roles().items():
            figures |= report.metrics(f"{prefix}{role}/")
        for env, report in self.envs().items():
            figures |= report.metrics(f"{prefix}env/{env}/")
        return figures

    def roles(self) -> dict[str, EvalReport]:
        """Returns `by_role` if there are several roles, and nothing otherwise."""
        roles = self.by_role()
        return roles if len(roles) > 1 else {}

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON: the figures, also of each role if there are several, then every result."""
        return {
            "name": self.name,
            "headline": self.headline.key,
            "outcomes": list(self.outcomes),
            "success_is": self.success_is,
            **self._figures(),
            "roles": {role: report._figures() for role, report in self.roles().items()},
            "episodes": [asdict(episode) for episode in self.episodes],
        }

    def _figures(self) -> dict[str, Any]:
        rates = {name: asdict(estimate) for name, estimate in self.rates().items()}
        return {"reward": asdict(self.reward), "rates": rates}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> EvalReport:
        """Reads what `to_dict` wrote; the figures are computed again."""
        episodes = tuple(EpisodeResult(**e) for e in data["episodes"])
        outcomes, success_is = tuple(data.get("outcomes", ())), data.get("success_is")
        return EvalReport(data["name"], episodes, outcomes, success_is, "headline" not in data)


@dataclass(frozen=True, slots=True)
class Headline:
    """The leading figure: an ending that the environment itself names; else success, if somebody
    said what that is; else the mean reward. A reward says how good an episode was for the training,
    and not whether it was solved, so it is never read as the one or the other."""

    kind: Literal["outcome", "success", "reward"]
    outcome: str = ""

    @property
    def name(self) -> str:
        """What it is called in a table."""
        return {"outcome": self.outcome, "reward": "mean reward"}.get(self.kind, self.kind)

    @property
    def key(self) -> str:
        """What it is called among the metrics and rates of a report."""
        return f"outcome/{self.outcome}" if self.kind == "outcome" else self.kind

    @property
    def is_rate(self) -> bool:
        """Whether it is a share of the episodes."""
        return self.kind != "reward"

    def value(self, episode: EpisodeResult) -> float:
        """What one episode adds to it."""
        if self.kind == "outcome":
            return float(episode.outcome == self.outcome)
        return float(bool(episode.success)) if self.kind == "success" else episode.reward

    def of(self, report: EvalReport) -> Estimate:
        """The figure of a report."""
        if self.kind == "outcome":
            return report.outcome(self.outcome)
        return report.success if self.kind == "success" else report.reward


def headline_of(reports: Iterable[EvalReport], outcomes: Sequence[str] = ()) -> Headline:
    """Returns what leads these reports together. `outcomes` are the endings that a run names, the
    one that counts first; without them, those that the reports name. Older reports without any
    ending may be of an environment that named none then: they are not read as if nobody came to
    the one that counts."""
    reports = list(reports)
    stated = outcomes or next((r.outcomes for r in reports if r.outcomes), ())
    seen = {episode.outcome for report in reports for episode in report.episodes}
    usual = next((name for name in USUAL if name in seen), None)  # others say "wrong", too
    usual = usual or next((name for name, others in USUAL.items() if seen & others), None)
    older = [report for report in reports if report.older]
    if older and all(e.outcome is None for report in older for e in report.episodes):
        usual = None
    outcome = stated[0] if stated else usual
    if outcome is not None:
        return Headline("outcome", outcome)
    if reports and all(report.success_is for report in reports):
        return Headline("success")
    return Headline("reward")


def _task(result: EpisodeResult, index: int) -> Hashable:
    """What the result is a sample of. Two environments may give their tasks the same names."""
    if result.task_key is not None:
        return result.env, result.task_key
    return ("episode", index) if result.env_seed is None else ("seed", result.env_seed)


def _mean(value: Callable[[EpisodeResult], float], results: Sequence[EpisodeResult]) -> float:
    """The mean over an episode's agents; of rewards near the largest float, too."""
    return fsum(value(result) / len(results) for result in results)


def compare(a: EvalReport, b: EvalReport) -> dict[str, PairedComparison]:
    """Compares B with A, episode by episode on the same environment seeds: the leading figure,
    success (where both know it, and mean the same by it) and reward, of all agents together and,
    if there are several, of each (`X/success`)."""
    if any(e.episode_id is None for report in (a, b) for e in report.episodes):
        # What an old report cannot tell apart must not be told apart in its partner.
        a, b = (
            replace(r, episodes=tuple(replace(e, episode_id=None) for e in r.episodes))
            for r in (a, b)
        )
    tests = _compare(a, b)
    theirs = b.roles()
    for role, report in a.roles().items():
        if role in theirs:
            each = _compare(report, theirs[role])
            tests |= {f"{role}/{name}": result for name, result in each.items()}
    return tests


def leading_tests(a: EvalReport, b: EvalReport) -> dict[str, PairedComparison]:
    """As `compare`, for people: the leading figure first, and success only where it leads."""
    tests, lead = compare(a, b), headline_of([a, b])
    if lead.kind == "outcome":
        tests = {name: test for name, test in tests.items() if not name.endswith("success")}
    return {name.replace("outcome/", ""): test for name, test in tests.items()}


def _compare(a: EvalReport, b: EvalReport) -> dict[str, PairedComparison]:
    left, right = _by_seed(a), _by_seed(b)
    if left.keys() != right.keys():
        missing = len(left.keys() ^ right.keys())
        raise ConfigError(
            f"{a.name!r} and {b.name!r} were not evaluated on the same seeds ({missing} episodes "
            "have no partner): run both with the same evaluation seed and number of episodes"
        )
    keys = sorted(left, key=str)
    tasks = [_task(left[key][0], index) for index, key in enumerate(keys)]

    def paired(value: Callable[[EpisodeResult], float]) -> PairedComparison:
        a, b = ([_mean(value, side[key]) for key in keys] for side in (left, right))
        return compare_paired(a, b, tasks=tasks)

    lead = headline_of([a, b])
    tests = {lead.key: paired(lead.value)}
    if a.knows_success and b.knows_success and a.older == b.older:
        tests["success"] = paired(lambda e: float(bool(e.success)))
    return tests | {"reward": paired(lambda e: e.reward)}


def _by_seed(report: EvalReport) -> dict[tuple[int | None, int], list[EpisodeResult]]:
    """Returns the episodes by their seed, numbered among those with the same seed."""
    seen: Counter[int | None] = Counter()
    episodes = {}
    for results in report.by_episode():
        seed = results[0].env_seed
        episodes[seed, seen[seed]] = results
        seen[seed] += 1
    return episodes


def report_table(reports: Sequence[EvalReport]) -> Any:
    """Returns a rich table: a column per report, and a row per rate, the leading figure first; for
    each environment and role, if there are several."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("", style="bold")
    for report in reports:
        table.add_column(f"{report.name} (n={len(report.by_episode())})", justify="right")
    lead = headline_of(reports)
    columns = [report.parts() for report in reports]
    parts = list(dict.fromkeys(part for column in columns for part in column)) or [""]
    empty = EvalReport("", ())
    for part in parts:
        shown = [column.get(part, empty) for column in columns]
        label = f"{part}: " if part else ""
        rates = [report.rates() for report in shown]
        rewards = [report.reward for report in shown]
        rows = {
            name: [
                _percent(rate.get(name) or proportion(0, len(report.by_episode())))
                for rate, report in zip(rates, shown, strict=True)
            ]
            for name in dict.fromkeys(name for rate in rates for name in rate)
        }
        rows["reward"] = [
            f"{r.value:.3f}  [{r.low:.3f}, {r.high:.3f}]" if r.n else "–" for r in rewards
        ]
        if lead.kind == "outcome" or len({report.older for report in reports}) > 1:
            rows.pop("success", None)  # which is what leads, or was something else before
        if lead.kind == "outcome":
            rows.setdefault(lead.key, [_percent(report.outcome(lead.outcome)) for report in shown])
        for name in sorted(rows, key=lambda name: name != lead.key):
            called = "mean reward" if name == "reward" else name.removeprefix("outcome/")
            table.add_row(label + called, *rows[name])
    return table


def _percent(rate: Estimate) -> str:
    return f"{rate.value:6.1%}  [{rate.low:.1%}, {rate.high:.1%}]" if rate.n else "–"


def read_report(path: Path) -> EvalReport:
    """Reads a report from its file, or from a run folder that of its last stage."""
    if path.is_dir():
        reports = [path / "eval" / f"{s}.json" for s in ("after_rl", "after_sft", "before")]
        path = next((file for file in reports if file.is_file()), reports[0])
    try:
        report = EvalReport.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as exc:
        raise ConfigError(f"there is no report at {path}") from exc
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{path} is not a report of `ludic eval`: {exc}") from exc
    return replace(report, name=str(path))
