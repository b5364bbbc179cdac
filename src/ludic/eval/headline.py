"""Which figure leads an evaluation, wherever it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ludic.eval.statistics import Estimate

if TYPE_CHECKING:
    from ludic.eval.report import EpisodeResult, EvalReport

USUAL = {
    "win": {"loss", "draw", "illegal"},
    "right": {"wrong"},
    "correct": {"incorrect"},
    "solved": {"unsolved"},
    "passed": {"failed", "crashed", "no_compile", "no_code", "too_long"},
    "success": {"failure"},
}
"""Names of the ending that counts, for environments of which the run does not say it, with what the
others are called where it counts: where nobody came to it, these tell that it was there."""


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
    one that counts first; without them, those that the reports name."""
    reports = list(reports)
    stated = outcomes or next((r.outcomes for r in reports if r.outcomes), ())
    outcome = stated[0] if stated else usual_outcome(e for r in reports for e in r.episodes)
    if outcome is not None:
        return Headline("outcome", outcome)
    if reports and all(report.success_is for report in reports):
        return Headline("success")
    return Headline("reward")


def usual_outcome(episodes: Iterable[EpisodeResult]) -> str | None:
    """Returns the ending among these that counts by its name; None if no name says it."""
    seen = {episode.outcome for episode in episodes}
    return next((name for name, others in USUAL.items() if seen & {name, *others}), None)
