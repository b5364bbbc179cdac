"""What an evaluation found: one record per episode, and the figures drawn from them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ludic.errors import ConfigError
from ludic.eval.statistics import (
    Estimate,
    PairedComparison,
    compare_paired,
    mean,
    pass_at_k,
    proportion,
)
from ludic.types import FinishReason, Rollout

Success = Callable[[Rollout], bool]


def reward_above(threshold: float = 0.0) -> Success:
    """An episode succeeds when its total reward exceeds `threshold`."""
    return lambda rollout: rollout.total_reward > threshold


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One evaluated episode. `outcome` is the environment's own word for the ending
    (`info["result"]` of its last step), where it has one."""

    env_seed: int | None
    task_key: str | None
    reward: float
    success: bool
    outcome: str | None = None
    turns: int = 0
    tokens: int = 0
    parse_failures: int = 0
    cut_completions: int = 0
    truncation: str | None = None
    error: str | None = None

    @staticmethod
    def of(rollout: Rollout, success: Success) -> EpisodeResult:
        """Reads a rollout. An episode that failed is no success, whatever its rewards were."""
        steps = rollout.env_steps
        outcome = steps[-1].info.get("result") if steps else None
        reason = rollout.truncation_reason
        return EpisodeResult(
            env_seed=rollout.env_seed,
            task_key=rollout.task_key,
            reward=rollout.total_reward,
            success=rollout.error is None and success(rollout),
            outcome=str(outcome) if outcome is not None else None,
            turns=len({step.turn_index for step in rollout.agent_steps}),
            tokens=rollout.num_tokens,
            parse_failures=sum(bool(step.info.get("parse_error")) for step in steps),
            cut_completions=sum(
                step.finish_reason is FinishReason.LENGTH for step in rollout.agent_steps
            ),
            truncation=reason.value if reason else None,
            error=rollout.error,
        )


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The episodes of one evaluation. Every rate has all of them in its denominator: episodes
    that failed to parse, were cut, or raised are counted as what they are."""

    name: str
    episodes: tuple[EpisodeResult, ...]

    @property
    def reward(self) -> Estimate:
        return mean([e.reward for e in self.episodes])

    @property
    def success(self) -> Estimate:
        return self.rate(lambda e: e.success)

    def rate(self, holds: Callable[[EpisodeResult], bool]) -> Estimate:
        """The share of episodes for which `holds`, with its interval."""
        return proportion(sum(map(bool, map(holds, self.episodes))), len(self.episodes))

    def outcome(self, name: str) -> Estimate:
        """The share of episodes that ended with the environment's outcome `name`."""
        return self.rate(lambda e: e.outcome == name)

    def rates(self) -> dict[str, Estimate]:
        """Every rate worth a line: success, each outcome, and what went wrong."""
        outcomes = Counter(e.outcome for e in self.episodes if e.outcome is not None)
        named = {f"outcome/{name}": self.outcome(name) for name in sorted(outcomes)}
        return {
            "success": self.success,
            **named,
            "parse_failure": self.rate(lambda e: e.parse_failures > 0),
            "cut_completion": self.rate(lambda e: e.cut_completions > 0),
            "truncated": self.rate(lambda e: e.truncation is not None),
            "error": self.rate(lambda e: e.error is not None),
        }

    def pass_at(self, k: int) -> Estimate:
        """pass@k over tasks, each with the samples that share its `task_key` (else its seed)."""
        tasks: dict[Any, list[bool]] = defaultdict(list)
        for episode in self.episodes:
            tasks[episode.task_key or episode.env_seed].append(episode.success)
        short = [key for key, wins in tasks.items() if len(wins) < k]
        if short:
            raise ConfigError(
                f"pass@{k} needs {k} samples of every task; task {short[0]!r} has "
                f"{len(tasks[short[0]])}: raise the number of samples per task"
            )
        return mean([pass_at_k(len(wins), sum(wins), k) for wins in tasks.values()])

    def metrics(self, prefix: str = "eval/") -> dict[str, float]:
        """Plain figures for a logger."""
        flat = {"reward": self.reward.value, "episodes": float(len(self.episodes))}
        flat |= {name: estimate.value for name, estimate in self.rates().items()}
        return {prefix + name: value for name, value in flat.items()}

    def to_dict(self) -> dict[str, Any]:
        """JSON: the figures first, then every episode."""
        return {
            "name": self.name,
            "reward": asdict(self.reward),
            "rates": {name: asdict(estimate) for name, estimate in self.rates().items()},
            "episodes": [asdict(episode) for episode in self.episodes],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> EvalReport:
        """Reads what `to_dict` wrote; the figures are computed anew."""
        return EvalReport(data["name"], tuple(EpisodeResult(**e) for e in data["episodes"]))


def compare(a: EvalReport, b: EvalReport) -> dict[str, PairedComparison]:
    """B against A, episode by episode on the same environment seeds: success and reward."""

    def keyed(report: EvalReport) -> dict[tuple[int | None, int], EpisodeResult]:
        seen: Counter[int | None] = Counter()
        rows = {}
        for episode in report.episodes:
            rows[episode.env_seed, seen[episode.env_seed]] = episode
            seen[episode.env_seed] += 1
        return rows

    left, right = keyed(a), keyed(b)
    if left.keys() != right.keys():
        missing = len(left.keys() ^ right.keys())
        raise ConfigError(
            f"{a.name!r} and {b.name!r} were not evaluated on the same seeds ({missing} episodes "
            "have no partner): run both with the same evaluation seed and number of episodes"
        )

    def paired(value: Callable[[EpisodeResult], float]) -> PairedComparison:
        keys = sorted(left, key=str)
        return compare_paired([value(left[k]) for k in keys], [value(right[k]) for k in keys])

    return {"success": paired(lambda e: float(e.success)), "reward": paired(lambda e: e.reward)}


def report_table(reports: Sequence[EvalReport]) -> Any:
    """A rich table: one column per report, one row per rate, with intervals."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("", style="bold")
    for report in reports:
        table.add_column(f"{report.name} (n={len(report.episodes)})", justify="right")
    names = list(dict.fromkeys(name for report in reports for name in report.rates()))

    def cell(estimate: Estimate | None, report: EvalReport) -> str:
        shown = estimate or proportion(0, len(report.episodes))
        return f"{shown.value:6.1%}  [{shown.low:.1%}, {shown.high:.1%}]" if shown.n else "–"

    for name in names:
        table.add_row(
            name.removeprefix("outcome/"),
            *(cell(report.rates().get(name), report) for report in reports),
        )
    rewards = [report.reward for report in reports]
    table.add_row("mean reward", *(f"{r.value:.3f}  [{r.low:.3f}, {r.high:.3f}]" for r in rewards))
    return table
