"""Every place that shows an evaluation leads with the same figure: the environment's own ending,
else success as the run states it, else the mean reward; never "any reward above 0"."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from ludic.errors import ConfigError
from ludic.eval import EpisodeResult, EvalReport, report_table
from ludic.eval.report import read_report
from ludic.runs.publishing.card import evaluation
from ludic.runs.results.report import RunReport
from ludic.runs.results.terminal import summary_of
from ludic.runs.results.watch import LearningWatch, hacked
from ludic.runs.settings import RunConfig, parse_run
from ludic.training.metrics.loggers import RichLiveLogger
from ludic.view.curves import CurveStore
from ludic.view.folders import RunPlace
from ludic.view.overview import card, figures

N = 100


def made(
    name: str,
    rewards: Sequence[float],
    endings: Sequence[str | None],
    *,
    outcomes: Sequence[str] = (),
    above: float | None = None,
    counts: str | None = None,
) -> EvalReport:
    episodes = []
    for i, (reward, ending) in enumerate(zip(rewards, endings, strict=True)):
        success = None if counts is None else ending == counts
        if above is not None:
            success = reward > above
        episodes.append(EpisodeResult(i, None, reward, success, outcome=ending, episode_id=str(i)))
    stated = None if above is None else f"reward above {above:g}"
    return EvalReport(name, tuple(episodes), tuple(outcomes), stated)


@dataclass(frozen=True)
class Shown:
    """A fixture: a run's evaluations, and what every place must lead with."""

    stages: Mapping[str, EvalReport]
    name: str
    before: str
    after: str
    key: str
    settings: str = ""


def hacked_run(outcomes: Sequence[str] = ("right", "wrong")) -> Shown:
    """The reward rises to all episodes; the environment's `right` falls from 26 to 1 of 100."""

    def stage(name: str, right: int, rewarded: int) -> EvalReport:
        rewards = [1.0 if i < rewarded else 0.0 for i in range(N)]
        endings = ["right" if i < right else "wrong" for i in range(N)]
        return made(name, rewards, endings, outcomes=outcomes, counts="right")

    stages = {"before": stage("before", 26, 26), "after_rl": stage("after_rl", 1, 98)}
    said = f"outcomes = {json.dumps(list(outcomes))}"
    return Shown(stages, "right", "26.0%", "1.0%", "eval/outcome/right", said)


def judged_run() -> Shown:
    """A judge's rewards: small and nearly all above 0, their mean 0.26."""

    def stage(name: str, high: float) -> EvalReport:
        rewards = [0.0 if i < 10 else high for i in range(N)]
        return made(name, rewards, [None] * N)

    stages = {"before": stage("before", 0.1), "after_rl": stage("after_rl", 0.26 / 0.9)}
    return Shown(stages, "mean reward", "0.09", "0.26", "eval/reward")


def stated_run() -> Shown:
    """The same, with a threshold that the run states."""
    stages = {
        name: made(name, [r] * 40 + [0.1] * 60, [None] * N, above=0.5)
        for name, r in (("before", 0.2), ("after_rl", 0.9))
    }
    return Shown(stages, "success", "0.0%", "40.0%", "eval/success", "success_above = 0.5")


def tic_tac_toe_run() -> Shown:
    def stage(name: str, wins: int, draws: int) -> EvalReport:
        endings = ["win"] * wins + ["draw"] * draws + ["loss"] * (N - wins - draws)
        rewards = [{"win": 1.0, "draw": 0.3, "loss": -1.0}[e] for e in endings]
        return made(name, rewards, endings, counts="win")

    stages = {"before": stage("before", 30, 40), "after_rl": stage("after_rl", 85, 10)}
    return Shown(stages, "win", "30.0%", "85.0%", "eval/outcome/win")


RUNS = {
    "hacked": hacked_run(),
    "hacked, its endings not stated": hacked_run(()),
    "judged": judged_run(),
    "judged with a threshold": stated_run(),
    "tic-tac-toe": tic_tac_toe_run(),
}


def config_of(run: Shown) -> RunConfig:
    return parse_run(f'[env]\nkind = "tic_tac_toe"\n[eval]\n{run.settings}\n')


def printed(thing: object) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=1000, highlight=False).print(thing)
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize("kind", RUNS)
def test_the_table_of_ludic_eval_leads_with_it(kind: str, tmp_path: Path) -> None:
    run = RUNS[kind]
    for stage, report in run.stages.items():
        (tmp_path / f"{stage}.json").write_text(json.dumps(report.to_dict()))
    reports = [read_report(tmp_path / f"{stage}.json") for stage in run.stages]
    _, first, *others = printed(report_table(reports))
    assert first.startswith(run.name)
    assert run.before in first
    assert run.after in first
    assert run.name == "success" or not any(line.startswith("success") for line in others)


@pytest.mark.parametrize("kind", RUNS)
def test_the_report_of_a_run_leads_with_it(kind: str) -> None:
    run = RUNS[kind]
    head, *rows = str(RunReport(run.stages, config_of(run).eval.outcomes)).splitlines()
    assert head.strip().startswith(run.name)
    before = next(row for row in rows if row.startswith("before"))
    after = next(row for row in rows if row.startswith("after rl"))
    assert before.split()[1].strip("+") == run.before
    assert after.split()[2].strip("+") == run.after


@pytest.mark.parametrize("kind", RUNS)
def test_the_viewer_leads_with_it(kind: str, tmp_path: Path) -> None:
    run = RUNS[kind]
    (tmp_path / "eval").mkdir()
    summary = summary_of(run.stages, config_of(run).eval.outcomes)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    headline = card(RunPlace("run", tmp_path, tmp_path), CurveStore())["headline"]
    assert headline["name"] == run.name
    assert headline["rate"] is (run.name != "mean reward")
    shown = "{:.1%}" if headline["rate"] else "{:.2f}"
    values = [shown.format(stage["value"]) for stage in headline["stages"].values()]
    assert values == [run.before, run.after]
    for report in run.stages.values():
        found = figures(report)
        assert "eval/" + found["headline"] == run.key
        assert ("success" in found["rates"]) is (run.name == "success")


@pytest.mark.parametrize("kind", RUNS)
def test_the_panel_of_the_terminal_and_the_published_card_lead_with_it(kind: str) -> None:
    run = RUNS[kind]
    report = run.stages["after_rl"]
    assert next(iter(report.metrics())) == run.key
    logger = RichLiveLogger((), console=Console(file=io.StringIO()))
    logger.log(report.metrics() | {"eval/step": 3.0}, 3)
    logger.close()
    assert (
        next(line for line in printed(logger.view()) if "eval/" in line).strip().startswith(run.key)
    )
    assert evaluation(run.stages)[0][:3] == ["stage", "episodes", run.name]


def test_success_is_a_metric_only_where_it_is_known() -> None:
    assert "eval/success" not in judged_run().stages["before"].metrics()
    assert tic_tac_toe_run().stages["before"].metrics()["eval/success"] == 0.3
    with pytest.raises(ConfigError, match=r"eval\.success_above"):
        _ = judged_run().stages["before"].success
    with pytest.raises(ConfigError, match=r"eval\.success_above"):
        judged_run().stages["before"].pass_at(1)


def test_a_run_of_an_older_version_is_read_and_its_positive_rewards_do_not_lead(
    tmp_path: Path,
) -> None:
    data = judged_run().stages["after_rl"].to_dict()
    for key in ("outcomes", "success_is", "headline"):
        del data[key]
    for episode in data["episodes"]:
        del episode["env"]
        episode["success"] = episode["reward"] > 0
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert read_report(tmp_path / "old.json").headline.name == "mean reward"
    figure = {"value": 0.9, "low": 0.8, "high": 1.0}
    reward = {"value": 0.26, "low": 0.2, "high": 0.3}
    old = {"headline": "success", "success_after_rl": figure, "reward_after_rl": reward}
    (tmp_path / "summary.json").write_text(json.dumps(old))
    headline = card(RunPlace("run", tmp_path, tmp_path), CurveStore())["headline"]
    assert headline == {"name": "mean reward", "rate": False, "stages": {"after_rl": reward}}
    (tmp_path / "summary.json").write_text(
        json.dumps({"headline": "win", "win_after_rl": figure, "reward_after_rl": reward})
    )
    headline = card(RunPlace("run", tmp_path, tmp_path), CurveStore())["headline"]
    assert headline == {"name": "win", "rate": True, "stages": {"after_rl": figure}}


@pytest.mark.parametrize("kind", RUNS)
def test_a_reward_that_rises_while_what_counts_falls_is_warned_of(kind: str) -> None:
    run = RUNS[kind]
    found = hacked(config_of(run), run.stages)
    if not kind.startswith("hacked"):
        assert found == []
        return
    (sentence,) = found
    assert "rose to +0.98 after RL, from +0.26 untrained" in sentence
    assert "'right' fell to 1.0%, from 26.0%" in sentence


def course(reward: Callable[[float], float], right: Callable[[float], float]) -> list[dict]:  # type: ignore[type-arg]
    rng, rows = Random(0), []
    for i in range(40):
        share = max(0.0, right(i / 40) + rng.gauss(0, 0.01))
        row = {"train/step": i + 1.0, "train/reward_mean": reward(i / 40) + rng.gauss(0, 0.02)}
        row["train/outcome/wrong"] = 1 - share
        rows.append(row | ({"train/outcome/right": share} if share else {}))
    return rows


@pytest.mark.parametrize("stated", ["", 'outcomes = ["right", "wrong"]'])
def test_it_is_warned_of_while_the_training_goes_on(stated: str) -> None:
    config = parse_run(f'[env]\nkind = "tic_tac_toe"\n[eval]\n{stated}\n')
    watch = LearningWatch(config)
    rows = course(lambda done: 0.3 + 0.6 * done, lambda done: 0.26 - 0.3 * done)
    during = [sentence for row in rows for sentence in watch.take(row)]
    assert len(during) == 1
    assert "reward of the training episodes rises while 'right' fell" in during[0]
    assert during[0].split(":")[0].startswith("the reward")
    assert [s for s in watch.standing().values() if "'right' fell" in s]
    learning = LearningWatch(config)
    for row in course(lambda done: 0.3 + 0.6 * done, lambda done: 0.26 + 0.5 * done):
        assert learning.take(row) == []


def test_an_evaluation_between_two_updates_warns_once() -> None:
    run = hacked_run()
    watch = LearningWatch(config_of(run), held_out=run.stages["before"])
    (sentence,) = watch.take_report(run.stages["after_rl"])
    assert "'right' fell to 1.0%" in sentence
    assert watch.take_report(run.stages["after_rl"]) == []
