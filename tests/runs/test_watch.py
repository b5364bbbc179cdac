"""A run that does not learn says so, with the setting to look at; one that learns is quiet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

from ludic.eval import Estimate, EvalReport
from ludic.eval.report import EpisodeResult
from ludic.inference import HFChatTemplate
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.runs.results.report import RunReport
from ludic.runs.results.watch import LearningWatch, doubtful, fallen, measured_alike
from ludic.runs.settings import RunConfig, parse_run

RUN = """
[env]
kind = "tic_tac_toe"

[inference.sampling]
max_tokens = 6

[sft]
teacher = "here:teacher"
learning_rate = 0.002

[training]
learning_rate = 0.001
"""
Metrics = Callable[[int], Mapping[str, float]]


def config(*overrides: str) -> RunConfig:
    return parse_run(RUN, list(overrides))


def course(
    reward: Callable[[float], float],
    entropy: Callable[[float], float] = lambda done: 1.0,
    same: float = 0.1,
    cut: float = 0.0,
    updates: int = 60,
) -> list[dict[str, float]]:
    """The metrics of a run whose figures follow these functions of the share that is done."""
    rng = Random(0)
    return [
        {
            "train/step": i + 1.0,
            "train/reward_mean": reward(i / updates) + rng.gauss(0, 0.05),
            "train/entropy": entropy(i / updates),
            "train/no_variance_group_rate": same,
            "train/cut_completion_rate": cut,
        }
        for i in range(updates)
    ]


def said(
    rows: Sequence[Mapping[str, float]], before: Estimate | None = None
) -> tuple[list[str], list[str]]:
    """What is said while the run goes on, and at its end."""
    watch = LearningWatch(config(), before)
    during = [sentence for row in rows for sentence in watch.take(row)]
    return during, list(watch.standing().values())


def report(name: str, rewards: Sequence[float]) -> EvalReport:
    episodes = (
        EpisodeResult(env_seed=i, task_key=None, reward=r, success=r > 0, episode_id=str(i))
        for i, r in enumerate(rewards)
    )
    return EvalReport(name, tuple(episodes))


@pytest.mark.parametrize("before", [None, Estimate(0.2, 0.15, 0.25, 400)])
def test_a_run_that_learns_and_then_needs_no_entropy_says_nothing(before: Estimate | None) -> None:
    rows = course(lambda done: 0.2 + 0.7 * done, entropy=lambda done: 1.0 - done)
    rows += course(lambda done: 0.9, entropy=lambda done: 0.01, same=0.9)
    assert said(rows, before) == ([], [])


def test_a_run_that_stays_where_it_is_says_nothing() -> None:
    assert said(course(lambda done: 0.5)) == ([], [])


def test_a_reward_that_falls_is_said_once_and_at_the_end_with_the_learning_rate() -> None:
    during, after = said(course(lambda done: 0.6 - 0.4 * done))
    assert len(during) == len(after) == 1
    assert "the reward of the training episodes fell to" in during[0]
    assert "training.learning_rate (now 0.001)" in after[0]


def test_a_reward_below_the_stage_before_is_said_although_training_never_fell() -> None:
    during, after = said(course(lambda done: 0.4), Estimate(0.58, 0.53, 0.63, 400))
    assert len(during) == len(after) == 1
    assert "from +0.58" in during[0]


def test_groups_without_variance_are_said_with_what_decides_it() -> None:
    during, after = said(course(lambda done: 0.0, same=0.8))
    assert len(during) == len(after) == 1
    assert "80% of the groups" in during[0]
    assert "algorithm.kwargs.group_size" in after[0]


def test_a_collapsed_entropy_is_said_with_the_bonus() -> None:
    during, after = said(course(lambda done: 0.5, entropy=lambda done: 1.0 if done < 0.3 else 0.02))
    assert len(during) == len(after) == 1
    assert "collapsed to" in during[0]
    assert "algorithm.kwargs.entropy_coeff" in after[0]


def stopping_at(reward: float) -> list[dict[str, float]]:
    """A run that learns something, and then gives the same answers every time."""
    rows = course(lambda done: 0.1 + (reward - 0.1) * done, entropy=lambda done: 1.0 - done)
    rows += course(lambda done: reward, entropy=lambda done: 0.01, same=0.9)
    return [{**row, "train/reward_max": 1.0, "train/reward_min": 0.0} for row in rows]


def test_a_policy_that_stopped_trying_says_so_once_although_its_reward_has_risen() -> None:
    during, after = said(stopping_at(0.5))
    assert len(during) == len(after) == 1
    assert "stopped exploring at a reward of +0.49 (the best episode got +1.00)" in during[0]
    assert "a tenth of training.learning_rate (now 0.001)" in after[0]
    assert said(stopping_at(0.97)) == ([], [])  # there is nothing left to try


def test_one_lucky_episode_is_not_what_a_policy_stopped_short_of() -> None:
    rows = [{**row, "train/reward_max": 0.5} for row in stopping_at(0.5)]
    rows[5]["train/reward_max"] = 10.0
    assert said(rows) == ([], [])


def test_cut_completions_are_said_with_the_limit() -> None:
    during, after = said(course(lambda done: 0.5, cut=0.7))
    assert len(during) == len(after) == 1
    assert "70% of the completions" in during[0]
    assert "inference.sampling.max_tokens (now 6)" in after[0]


def test_what_is_over_is_said_while_it_runs_and_not_at_the_end() -> None:
    rows = course(lambda done: 0.5, cut=0.9, updates=20) + course(lambda done: 0.5, updates=20)
    during, after = said(rows)
    assert len(during) == 1
    assert after == []


def test_a_short_run_says_it_at_the_end_and_a_shorter_one_does_not() -> None:
    assert said(course(lambda done: 0.5, cut=0.9, updates=3)) == ([], [])
    during, after = said(course(lambda done: 0.5, cut=0.9, updates=6))
    assert during == []
    assert len(after) == 1


def test_figures_that_are_missing_or_not_finite_are_no_signs() -> None:
    rows = [{"train/step": float(i), "train/reward_mean": float("nan")} for i in range(40)]
    assert said(rows) == ([], [])


def test_a_resumed_run_knows_what_was_said(tmp_path: Path) -> None:
    rows = course(lambda done: 0.5, cut=0.9)
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    watch, half, whole = (LearningWatch(config()) for _ in range(3))
    watch.take_file(log, 30)
    assert [s for row in rows[30:] for s in watch.take(row)] == []
    for row in rows:
        whole.take(row)
    assert watch.standing() == whole.standing()
    half.take_file(log, 3)
    assert half.standing() == {}


def test_a_stage_that_made_it_worse_is_named_with_its_setting() -> None:
    good, bad = report("a", [1.0] * 40 + [0.0] * 20), report("b", [1.0] * 20 + [0.0] * 40)
    (worse,) = fallen(config(), {"before": bad, "after_sft": good, "after_rl": bad})
    assert "after RL, from +0.67 after SFT" in worse
    assert "training.learning_rate (now 0.001)" in worse
    (worse,) = fallen(config(), {"before": good, "after_sft": bad, "after_rl": bad})
    assert "sft.learning_rate (now 0.002)" in worse
    assert fallen(config(), {"before": bad, "after_sft": good, "after_rl": good}) == []
    silent, playing = report("a", [-0.1] * 60), report("b", [1.0] * 15 + [-1.0] * 45)
    assert fallen(config(), {"before": silent, "after_sft": playing}) == []
    assert fallen(config(), {"before": good}) == fallen(config(), {}) == []


def test_only_an_evaluation_like_the_training_is_compared_with_it() -> None:
    measured = report("before", [1.0, 0.0])
    assert measured_alike(config(), measured) == measured.reward
    assert measured_alike(config(), None) is None
    assert measured_alike(config("eval.temperature=0"), measured) is None
    assert measured_alike(config("eval.env={kind='key_door'}"), measured) is None


def test_an_adapter_over_random_weights_is_doubted() -> None:
    (doubt,) = doubtful(config("model.lora.rank=4"))
    assert "[model.lora]" in doubt
    assert doubtful(config()) == doubtful(config("model.name=other", "model.lora.rank=4")) == []


@pytest.mark.parametrize(
    ("setting", "with_effect"),
    [
        ("sft={data='rows.jsonl', examples=20}", "sft={teacher='a:b', examples=20}"),
        ("training.final_lr_ratio=0.1", "training.schedule=linear"),
        ("training.past_share=0.9", "training.past_opponents=2"),
        ("reference={model='start', horizon='token'}", "reference.kl_in_reward=0.1"),
        ("inference={backend='vllm', deterministic=true}", "inference.backend=local"),
    ],
)
def test_a_setting_without_effect_is_doubted(setting: str, with_effect: str) -> None:
    (doubt,) = doubtful(config(setting))
    assert "has no effect" in doubt
    assert doubtful(config(setting, with_effect)) == []


@pytest.mark.parametrize("table", ["env", "eval.env"])
def test_more_attempts_than_turns_are_doubted(table: str) -> None:
    code = f"{table}={{kind='code_exec', kwargs={{max_attempts=3}}}}"
    (doubt,) = doubtful(config(code, "training.max_steps=2"))
    assert "code_exec: max_attempts=3" in doubt
    assert "training.max_steps=2" in doubt
    assert doubtful(config(code, "training.max_steps=3")) == []


def test_a_report_ends_with_its_warnings() -> None:
    stages = {"before": report("before", [1.0, 0.0])}
    assert str(RunReport(stages, (), ("look out",))).endswith("\nwarning: look out")
    assert "warning" not in str(RunReport(stages))


def test_a_base_model_that_does_not_stop_where_its_template_ends_a_message_is_doubted() -> None:
    tokenizer, model = tiny_tokenizer(), tiny_model()
    end = tokenizer.eos_token_id
    template = HFChatTemplate(tokenizer)
    assert doubtful(config(), model, template) == []
    tokenizer.eos_token = "~"
    assert doubtful(config(), model, template) == []  # the model's own settings name it
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    (doubt,) = doubtful(config(), model, template)
    assert "'<|im_end|>', which ends a message" in doubt
    assert f"stop_token_ids = [{end}]" in doubt
    for stopped in (f"stop_token_ids=[{end}]", "stop=['<|im_end|>']"):
        assert doubtful(config(f"inference.sampling.{stopped}"), model, template) == []
