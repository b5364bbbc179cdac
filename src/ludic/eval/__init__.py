"""Evaluation: held-out episodes, rates with intervals, paired comparisons."""

from ludic.eval.evaluator import Evaluator as Evaluator
from ludic.eval.evaluator import RolloutEvaluator as RolloutEvaluator
from ludic.eval.evaluator import episodes_bar as episodes_bar
from ludic.eval.evaluator import eval_requests as eval_requests
from ludic.eval.evaluator import run_eval as run_eval
from ludic.eval.report import EpisodeResult as EpisodeResult
from ludic.eval.report import EvalReport as EvalReport
from ludic.eval.report import Headline as Headline
from ludic.eval.report import compare as compare
from ludic.eval.report import headline_of as headline_of
from ludic.eval.report import report_table as report_table
from ludic.eval.report import reward_above as reward_above
from ludic.eval.statistics import Estimate as Estimate
from ludic.eval.statistics import PairedComparison as PairedComparison
from ludic.eval.statistics import compare_paired as compare_paired
from ludic.eval.statistics import pass_at_k as pass_at_k
from ludic.eval.statistics import proportion as proportion
