"""Says when a run does not learn, or unlearns, and which setting to look at."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from ludic.eval import Estimate, EvalReport, compare, headline_of
from ludic.eval.report import USUAL
from ludic.inference import HFChatTemplate
from ludic.inference.local.client import eos_ids
from ludic.plumbing.model_parts import base_causal_lm
from ludic.runs.settings import RunConfig
from ludic.runs.settings.base import Section

WINDOW = 10
"""How many updates are averaged. While a run goes on, nothing is said before there are as many."""
FEWEST = 4
"""From how many updates on there is anything to say at the end of a run."""
MOST = 0.5
COLLAPSED = 0.1
"""The share of the first updates' entropy below which it has collapsed."""
SURE = 4.0
"""How many standard errors a change must have: it is looked for after every update."""
P_VALUE = 0.05

REWARD, ENTROPY = "train/reward_mean", "train/entropy"
SAME, CUT = "train/no_variance_group_rate", "train/cut_completion_rate"
BEST, WORST = "train/reward_max", "train/reward_min"
SOLVED = 0.9
"""The share of the way from the worst reward of the run to the best from which it counts as
learned: then there is nothing left to try."""
OUTCOME = "train/outcome/"
"""The prefix of the endings' rates; as a sign, that the one which counts falls."""


_REWARDED = (
    "the policy is exploiting the reward; look at episodes with a high reward in `ludic view`, and "
    "change what the environment rewards"
)


class LearningWatch:
    """Looks at each update's metrics for signs that a run does not learn.

    `before` is the reward of the stage before, if it was measured in the same way; without it, the
    first updates stand for it. Little entropy and equal rewards in a group are also what a policy
    has that solves its task, so either counts only if the reward has not risen, and both together
    if it is not near the best that an episode of the run got. A reward that rises
    while the ending that counts becomes rarer is the sign of a reward that can be had otherwise.
    `held_out` is the evaluation before the training, with which those during it are compared.
    """

    def __init__(
        self, config: RunConfig, before: Estimate | None = None, held_out: EvalReport | None = None
    ) -> None:
        self.config, self.before, self.held_out = config, before, held_out
        keys = (REWARD, ENTROPY, SAME, CUT, BEST, WORST, OUTCOME)
        self._values: dict[str, list[float]] = {key: [] for key in keys}
        self._counts = config.eval.outcomes[0] if config.eval.outcomes else None
        self._said: set[str] = set()

    def take(self, metrics: Mapping[str, float]) -> list[str]:
        """Adds an update; returns what there is to say of it that has not been said before."""
        for key, values in self._values.items():
            value = self._outcome_rate(metrics) if key == OUTCOME else metrics.get(key)
            if isinstance(value, (int, float)) and math.isfinite(value):
                values.append(float(value))
        signs = self._signs(WINDOW)
        new = [sentence for sign, sentence in signs.items() if sign not in self._said]
        self._said |= signs.keys()
        return new

    def take_report(self, report: EvalReport) -> list[str]:
        """Takes an evaluation between two updates; returns what there is to say of it, once."""
        if self.held_out is None or "held-out" in self._said:
            return []
        sentences = hacked(self.config, {"before": self.held_out, "now": report})
        self._said |= {"held-out"} if sentences else set()
        return sentences

    def _outcome_rate(self, metrics: Mapping[str, float]) -> float | None:
        """The rate of the ending that counts; None where the environment names no endings."""
        if not any(key.startswith(OUTCOME) for key in metrics):
            return None
        if self._counts is None:
            self._counts = next((name for name in USUAL if OUTCOME + name in metrics), None)
        return None if self._counts is None else metrics.get(OUTCOME + self._counts, 0.0)

    def take_file(self, metrics: Path, steps: int) -> None:
        """Adds the first `steps` updates of a run from its log, without a word."""
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
        for row in map(json.loads, lines):
            if row.get("train/step", math.inf) <= steps:
                self.take(row)

    def standing(self) -> dict[str, str]:
        """Returns what there is to say of the last updates, each by its metric."""
        updates = max(map(len, self._values.values()))
        if updates < FEWEST:
            return {}
        window = min(WINDOW, updates // 2)
        return self._signs(window)

    def _short_of_best(self, last: Mapping[str, list[float]]) -> bool:
        """Whether the reward is known to be far from the best that episodes of the run get: what is
        best in half of the updates. Of several environments each may have its own best."""
        if REWARD not in last or not self._values[BEST] or not self._values[WORST]:
            return False
        if len(self.config.env) > 1:
            return False
        best, worst = median(self._values[BEST]), min(self._values[WORST])
        return fmean(last[REWARD]) < worst + SOLVED * (best - worst)

    def _signs(self, window: int) -> dict[str, str]:
        """Returns a sentence for each sign in the last `window` updates, by the sign's metric."""
        sampling, training = self.config.inference.sampling, self.config.training
        last = {k: values[-window:] for k, values in self._values.items() if len(values) >= window}
        first = {k: v[:window] for k, v in self._values.items() if len(v) >= 2 * window}
        signs: dict[str, str] = {}
        change = _change(first.get(REWARD), last.get(REWARD), self.before)
        if change is not None and change[1] < 0:
            signs[REWARD] = (
                f"the reward of the training episodes fell to {fmean(last[REWARD]):+.2f}, from "
                f"{change[0]:+.2f}: lower training.learning_rate (now {training.learning_rate:g})"
            )
        risen = change is not None and change[1] > 0
        if risen and (fell := _change(first.get(OUTCOME), last.get(OUTCOME))) and fell[1] < 0:
            signs[OUTCOME] = (
                f"the reward of the training episodes rises while {self._counts!r} fell to "
                f"{fmean(last[OUTCOME]):.1%}, from {fell[0]:.1%}: {_REWARDED}"
            )
        same = SAME in last and fmean(last[SAME]) > MOST
        collapsed = ENTROPY in first and fmean(last[ENTROPY]) < COLLAPSED * fmean(first[ENTROPY])
        if same and collapsed and self._short_of_best(last):
            signs[ENTROPY] = (
                f"the policy stopped exploring at a reward of {fmean(last[REWARD]):+.2f} (the best "
                f"episode got {max(self._values[BEST]):+.2f}): its entropy fell to "
                f"{fmean(last[ENTROPY]):.3g} nats per token, from {fmean(first[ENTROPY]):.3g}, and "
                f"in {fmean(last[SAME]):.0%} of the groups every episode got the same reward; "
                f"start again with a tenth of training.learning_rate (now "
                f"{training.learning_rate:g})"
            )
        elif same and not risen:
            signs[SAME] = (
                f"in {fmean(last[SAME]):.0%} of the groups every episode got the same reward, "
                "which teaches nothing: the tasks are too easy or too hard for this policy; look "
                "at env.kwargs, algorithm.kwargs.group_size and inference.sampling.temperature "
                f"(now {sampling.temperature:g})"
            )
        if collapsed and not risen and ENTROPY not in signs:
            signs[ENTROPY] = (
                f"the entropy collapsed to {fmean(last[ENTROPY]):.3g} nats per token, from "
                f"{fmean(first[ENTROPY]):.3g}, so there is hardly anything left to explore: set "
                "algorithm.kwargs.entropy_coeff (to 0.01, say), or lower training.learning_rate "
                f"(now {training.learning_rate:g})"
            )
        if CUT in last and fmean(last[CUT]) > MOST:
            signs[CUT] = (
                f"{fmean(last[CUT]):.0%} of the completions were cut off: raise "
                f"inference.sampling.max_tokens{_now(sampling.max_tokens)} or "
                f"inference.max_context_tokens{_now(self.config.inference.max_context_tokens)}"
            )
        return signs


def _change(
    first: list[float] | None, last: list[float] | None, before: Estimate | None = None
) -> tuple[float, float] | None:
    """A figure before, and by how much more than chance it changed; None if not known."""
    if last is None or (first is None and before is None) or len(last) < 2:
        return None
    now, noise = fmean(last), variance(last) / len(last)
    if before is not None:
        then, low, high = before.value, before.low, before.high
    else:
        assert first is not None
        then = low = high = fmean(first)
        noise += variance(first) / len(first)
    margin = SURE * math.sqrt(noise) + 1e-9
    return then, min(now + margin - low, 0.0) + max(now - margin - high, 0.0)


def measured_alike(config: RunConfig, report: EvalReport | None) -> Estimate | None:
    """Returns an evaluation's reward if its episodes are like those of the training: the same
    environments, protocol and temperature, and one agent."""
    held_out, sampling = config.eval, config.inference.sampling
    if report is None or held_out.env or held_out.protocol is not None or report.roles():
        return None
    same = held_out.temperature is None or held_out.temperature == sampling.temperature
    return report.reward if same and len(config.env) == 1 else None


def fallen(config: RunConfig, reports: Mapping[str, EvalReport]) -> list[str]:
    """Says for each stage whether its reward is lower than the stage before's, by a paired test
    on the same seeds. A cold start that turns silence into lost games, and some won, did not fail:
    where the leading figure rose, nothing is said."""
    sentences = []
    for earlier, later in pairwise(reports):
        advice = f"lower training.learning_rate (now {config.training.learning_rate:g})"
        if later == "after_sft" and config.sft is not None:
            advice = f"lower sft.learning_rate (now {config.sft.learning_rate:g}), or look at the "
            advice += "teacher or the data"
        # Reports of older versions lack the outcomes that the run names.
        outcomes = tuple(config.eval.outcomes)
        a, b = (
            replace(r, outcomes=outcomes or r.outcomes) for r in (reports[earlier], reports[later])
        )
        tests, lead = compare(a, b), headline_of([a, b])
        test = tests["reward"]
        fell = test.difference.value < 0 and test.p_value < P_VALUE
        if fell and tests.get("success", tests[lead.key]).difference.value <= 0:
            sentences.append(
                f"the held-out reward fell to {b.reward.value:+.2f} {_spoken(later)}, from "
                f"{a.reward.value:+.2f} {_spoken(earlier)} (p = {test.p_value:.2g}): {advice}"
            )
    return sentences


def hacked(config: RunConfig, reports: Mapping[str, EvalReport]) -> list[str]:
    """Says for each stage whether its reward is higher than the stage before's although the leading
    figure is lower, both by a paired test on the same seeds."""
    lead = headline_of(reports.values(), config.eval.outcomes)
    if not lead.is_rate:
        return []
    sentences = []
    outcomes = (lead.outcome,) if lead.outcome else ()  # a pair may not have come to it at all
    for earlier, later in pairwise(reports):
        a, b = (replace(reports[stage], outcomes=outcomes) for stage in (earlier, later))
        tests = compare(a, b)
        reward, rate = tests["reward"], tests[lead.key]
        rose = reward.difference.value > 0 and reward.p_value < P_VALUE
        if rose and rate.difference.value < 0 and rate.p_value < P_VALUE:
            sentences.append(
                f"the held-out reward rose to {b.reward.value:+.2f} {_spoken(later)}, from "
                f"{a.reward.value:+.2f} {_spoken(earlier)}, while {lead.name!r} fell to "
                f"{lead.of(b).value:.1%}, from {lead.of(a).value:.1%}: {_REWARDED}"
            )
    return sentences


def doubtful(config: RunConfig, model: Any = None, template: Any = None) -> list[str]:
    """Says which settings do not go together, although each is right."""
    doubts = _without_effect(config)
    if config.model.name == "tiny" and config.model.lora is not None:
        doubts.append(
            'model.name="tiny" has random weights, and [model.lora] leaves its embeddings as they '
            "are, so it learns next to nothing: leave [model.lora] out, or name a trained model"
        )
    most = config.training.max_steps
    for section in (*config.env, *config.eval.env):
        attempts = section.kwargs.get("max_attempts")
        if isinstance(attempts, int) and attempts > most:
            doubts.append(
                f"{section.kind}: max_attempts={attempts}, but training.max_steps={most} cuts the "
                "episode before the last attempt, and it earns nothing: raise max_steps"
            )
    if isinstance(template, HFChatTemplate) and template.tokenizer.eos_token_id is not None:
        end, sampling = template.end_token_id, config.inference.sampling
        spelled = template.tokenizer.decode([end])
        ends = eos_ids(base_causal_lm(model), template.tokenizer).union(sampling.stop_token_ids)
        if end not in ends and spelled not in sampling.stop:
            doubts.append(
                f"sampling does not stop at {spelled!r}, which ends a message in the chat "
                f"template: set inference.sampling.stop_token_ids = [{end}]"
            )
    return doubts


def _without_effect(config: RunConfig) -> list[str]:
    """Says which settings were given that nothing in this run goes by."""
    training, inference = config.training, config.inference
    sft, reference = config.sft, config.reference
    local = training.past_opponents or any(player.server is None for player in config.player)
    idle: dict[str, tuple[Section | None, bool, str]] = {
        "sft.examples": (
            sft,
            sft is not None and sft.data is not None,
            "it applies to sft.teacher; with sft.data, all rows are used",
        ),
        "training.final_lr_ratio": (
            training,
            training.schedule == "constant",
            'training.schedule="constant" keeps the learning rate constant',
        ),
        "training.past_share": (
            training,
            not training.past_opponents,
            "there are no training.past_opponents",
        ),
        "reference.horizon": (
            reference,
            reference is not None and not reference.kl_in_reward,
            "it applies to reference.kl_in_reward, which is 0",
        ),
        "inference.deterministic": (
            inference,
            inference.backend == "vllm" and not local,
            "it applies to the in-process engine; vLLM's samples depend on the rest of its batch",
        ),
    }
    doubts = []
    for place, (section, is_idle, why) in idle.items():
        name = place.partition(".")[2]
        if section is None or not is_idle:
            continue
        value = getattr(section, name)
        if value and value != type(section).model_fields[name].get_default():
            doubts.append(f"{place}={value} has no effect: {why}")
    return doubts


def _now(value: int | None) -> str:
    return "" if value is None else f" (now {value})"


def _spoken(stage: str) -> str:
    spoken = {"before": "untrained", "after_sft": "after SFT", "after_rl": "after RL"}
    return spoken.get(stage, stage)
