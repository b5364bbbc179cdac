"""Evaluation: held-out episodes, rates with intervals, paired comparisons."""

from ludic.eval.evaluator import Evaluator, RolloutEvaluator, eval_requests, run_eval
from ludic.eval.headline import Headline, headline_of
from ludic.eval.progress import episodes_bar
from ludic.eval.report import (
    EpisodeResult,
    EvalReport,
    compare,
    report_table,
    reward_above,
)
from ludic.eval.statistics import Estimate, PairedComparison, compare_paired, pass_at_k, proportion

__all__ = [
    "EpisodeResult",
    "Estimate",
    "EvalReport",
    "Evaluator",
    "Headline",
    "PairedComparison",
    "RolloutEvaluator",
    "compare",
    "compare_paired",
    "episodes_bar",
    "eval_requests",
    "headline_of",
    "pass_at_k",
    "proportion",
    "report_table",
    "reward_above",
    "run_eval",
]
