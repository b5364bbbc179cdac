"""A run with several environments shows each of them, and the stage of its curriculum."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from ludic.errors import ConfigError
from ludic.eval import EpisodeResult, EvalReport, report_table
from ludic.rollouts import FixedMix, Stage, Stages
from ludic.runs.check_episodes import check_episodes
from ludic.runs.episodes import eval_plan, requests_of
from ludic.runs.results.report import RunReport
from ludic.runs.results.terminal import shown_metrics, summary_of
from ludic.runs.settings import parse_run
from ludic.saw.batch import make_batch
from ludic.saw.statistics import rollout_statistics
from ludic.training.metrics.stats import batch_metrics
from ludic.types import AgentStep, EnvironmentStep, FinishReason, Rollout
from ludic.view.overview import figures

RUN = """
[[env]]
kind = "key_door"
name = "small"
kwargs = { size = 4 }

[[env]]
kind = "key_door"
name = "large"
kwargs = { size = 6 }

[eval]
episodes = 10

[curriculum]
kind = "stages"

[[curriculum.stage]]
envs = ["small"]
episodes = 4

[[curriculum.stage]]
envs = ["small", "large"]
"""


def rollout(number: int, env: str | None, stage: int | None, reward: float) -> Rollout:
    meta = {k: v for k, v in (("env", env), ("stage", stage)) if v is not None}
    message = {"role": "assistant", "content": "x"}
    call = AgentStep(0, (), message, FinishReason.STOP)  # type: ignore[arg-type]
    step = EnvironmentStep(0, (0,), "o", "a", "end", reward, terminated=True)
    return Rollout(id=f"r{number}", steps=(call, step), episode_id=f"e{number}", meta=meta)


def test_the_requests_of_a_run_carry_the_name_of_their_environment() -> None:
    mix = requests_of(parse_run(RUN))
    assert [request.meta["env"] for request, _ in mix.values()] == ["small", "large"]
    assert {request.meta["env"] for request in eval_plan(parse_run(RUN))} == {"small", "large"}
    (alone,) = requests_of(parse_run('[env]\nkind = "key_door"\n')).values()
    assert "env" not in alone[0].meta


def test_all_held_out_episodes_are_each_row_once(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 5)
    text = f'[env]\nkind = "gsm8k"\nkwargs = {{ path = "{file}" }}\n[eval]\nepisodes = "all"\n'
    plan = eval_plan(parse_run(text))
    assert [request.env.kwargs["index"] for request in plan] == [0, 1, 2, 3, 4]
    assert len({request.sampling_seed for request in plan}) == 5
    twice = eval_plan(parse_run(text, ["eval.samples_per_task=2"]))
    assert [request.env.kwargs["index"] for request in twice] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    with pytest.raises(ConfigError, match="'key_door' has no rows: set a number"):
        eval_plan(parse_run('[env]\nkind = "key_door"\n', ['eval.episodes="all"']))
    with pytest.raises(ConfigError, match="'key_door' has no rows"):
        check_episodes(parse_run('[env]\nkind = "key_door"\n', ['eval.episodes="all"']))
    one = text.replace(f'"{file}" }}', f'"{file}", index = 3 }}')
    with pytest.raises(ConfigError, match="has one, by its index"):
        eval_plan(parse_run(one))


@pytest.mark.parametrize(("episodes", "samples"), [(9, 1), (36, 4), (10, 1), (34, 4)])
def test_held_out_episodes_are_shared_out_evenly_in_whole_tasks(
    episodes: int, samples: int
) -> None:
    envs = "".join(f'[[env]]\nkind = "key_door"\nname = "{name}"\n' for name in "abcdefgh")
    settings = [f"eval.episodes={episodes}", f"eval.samples_per_task={samples}"]
    plan = eval_plan(parse_run(envs, settings))
    assert len(plan) == episodes
    counts = Counter(request.meta["env"] for request in plan)
    assert len(counts) == 8
    assert max(counts.values()) - min(counts.values()) < 2 * samples
    tasks = Counter((request.meta["env"], request.env_seed) for request in plan)
    assert sorted(tasks.values())[1:] == [samples] * (len(tasks) - 1)


def test_a_wrong_number_of_held_out_episodes_is_named_as_the_setting_is() -> None:
    with pytest.raises(ConfigError, match=r"'eval\.episodes' = 0: .*\(from the command line\)"):
        parse_run('[env]\nkind = "key_door"\n', ["eval.episodes=0"])


def test_the_metrics_of_an_update_have_each_environments_reward_and_the_stage() -> None:
    rewards = [("small", 1.0), ("small", 0.0), ("large", -1.0)]
    played = [rollout(i, env, 1, reward) for i, (env, reward) in enumerate(rewards)]
    metrics = batch_metrics(make_batch((), rollout_statistics(played)))
    assert metrics["train/env/small/reward_mean"] == 0.5
    assert metrics["train/env/large/reward_mean"] == -1.0
    assert metrics["train/env/large/rollouts"] == 1
    assert metrics["train/curriculum_stage"] == 2
    plain = batch_metrics(make_batch((), rollout_statistics([rollout(0, None, None, 1.0)])))
    assert not any(key.startswith("train/env/") or "stage" in key for key in plain)


def test_the_stage_of_the_metrics_is_that_of_the_curriculum() -> None:
    mix = requests_of(parse_run(RUN))
    stages = Stages(
        [Stage(FixedMix({"small": mix["small"]}), episodes=2), Stage(FixedMix(dict(mix)))]
    )
    seen = []
    for _ in range(3):
        requests = stages.next_requests(2)
        played = [
            replace(rollout(i, None, None, 1.0), meta=dict(request.meta))
            for i, request in enumerate(requests)
        ]
        seen.append(rollout_statistics(played)["curriculum_stage"])
        stages.report(played)
    assert seen == [1, 2, 2]


def test_the_terminal_shows_them_while_the_run_goes_on() -> None:
    keys = shown_metrics(parse_run(RUN), "rl")
    assert "train/curriculum_stage" in keys
    assert {"train/env/small/reward_mean", "train/env/large/reward_mean"} <= set(keys)
    assert not any("env/" in key for key in shown_metrics(parse_run('[env]\nkind="a"\n'), "rl"))


def evaluated(name: str) -> EvalReport:
    episodes = [
        EpisodeResult(i, None, reward, None, episode_id=f"{env}{i}", env=env)
        for env, reward in (("small", 1.0), ("large", -0.5))
        for i in range(5)
    ]
    return EvalReport(name, tuple(episodes))


def test_an_ending_never_reached_is_0_and_one_that_an_environment_lacks_is_left_open() -> None:
    def report(name: str, ending: str | None) -> EvalReport:
        games = (EpisodeResult(0, None, 0.0, None, outcome=ending, episode_id="g", env="game"),)
        return EvalReport(name, (*games, *evaluated(name).episodes[:1]))

    stages = {"before": report("before", None), "after_rl": report("after_rl", "win")}
    rows = str(RunReport(stages)).splitlines()
    cells = {row[:18].strip(): row[18:].split() for row in rows if "," in row}
    assert cells["before, game"][0] == "0.0%"
    assert cells["after rl, game"][0] == "100.0%"
    assert cells["before, small"][0] == cells["after rl, small"][0] == "–"


def test_an_evaluation_reports_each_environment_by_itself() -> None:
    report = evaluated("before")
    rows = str(RunReport({"before": report})).splitlines()
    assert next(row for row in rows if row.startswith("before, small")).split()[2] == "+1.00"
    assert next(row for row in rows if row.startswith("before, large")).split()[2] == "-0.50"
    text = io.StringIO()
    Console(file=text, width=120).print(report_table([report]))
    assert "small: mean reward" in text.getvalue()
    assert "large: mean reward" in text.getvalue()
    metrics = report.metrics()
    assert (metrics["eval/env/small/reward"], metrics["eval/env/large/reward"]) == (1.0, -0.5)
    summary = summary_of({"before": report})
    assert summary["envs"]["large"]["reward_before"]["value"] == -0.5
    assert figures(report)["envs"]["small"]["value"] == 1.0
    assert EvalReport.from_dict(report.to_dict()).envs().keys() == {"small", "large"}
