"""The driver of the learning runs: settings that hold, priorities, deadlines, and what is cut."""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks import trl_loop
from benchmarks.gsm8k import readme_text
from benchmarks.real_models import Driver, chosen
from benchmarks.real_runs import Job, all_jobs, write_sums
from ludic.runs.check import check_parts
from ludic.runs.settings import RunConfig, find_run


def arguments(tmp_path: Path, **others: object) -> argparse.Namespace:
    usual: dict[str, object] = {
        **{"small": "tiny", "large": "tiny", "data": tmp_path, "work": tmp_path, "set": []},
        **{"out": tmp_path / "out", "lanes": 2, "gpu_gb": 100.0, "note": []},
        **{"updates_large": 3, "updates_small": 2, "eval_large": '"all"', "eval_small": "8"},
    }
    return argparse.Namespace(**(usual | others))


def settings(job: Job, args: argparse.Namespace) -> RunConfig:
    words = job.command(args, args.work, args.work / job.name)
    run, *rest = words[words.index("train") + 1 :]
    overrides = [word for word in rest if "=" in word]
    return find_run(run, overrides)[0]


def test_the_settings_of_every_run_hold(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    (tmp_path / "gsm8k.toml").write_text(readme_text())
    for file in ("train.jsonl", "test.jsonl"):
        (tmp_path / file).write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    write_sums(tmp_path)
    jobs = {job.name: job for job in all_jobs(args) if job.kind == "train" and not job.seed}
    configs = {name: settings(job, args) for name, job in jobs.items()}
    for name, config in configs.items():
        if name in ("gsm8k-1.5b-s0", "redis-s0", "rate-spo") or name.startswith("algo-"):
            check_parts(config)  # what the others need is not there
    assert configs["gsm8k-1.5b-s0"].eval.episodes == "all"
    assert not any(config.training.resumable for config in configs.values())
    assert {c.training.rollouts_per_update for c in configs.values()} == {128}
    rates = {c.training.learning_rate for name, c in configs.items() if name.startswith("algo-")}
    assert len(rates) == 1
    student = configs["mopd-student"]
    assert [env.name for env in student.env] == ["gsm8k", "sums"]
    assert [teacher.envs for teacher in student.teacher] == [["gsm8k"], ["sums"]]
    assert configs["ahead-s0"].training.overlap


def test_the_peer_is_called_with_arguments_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[trl_loop.Settings] = []

    def train(given: trl_loop.Settings) -> list[trl_loop.Update]:
        seen.append(given)
        return [trl_loop.Update(1, 1.0, 0.5, 10.0)]

    monkeypatch.setattr(trl_loop, "train", train)
    (job,) = chosen(all_jobs(args := arguments(tmp_path)), ["trl-1.5b-s0"])
    words = job.command(args, tmp_path, tmp_path / job.name)
    trl_loop.main([*words[words.index("benchmarks.trl_loop") + 1 :], "--device", "cpu"])
    assert (seen[0].updates, seen[0].episodes, seen[0].generator) == (3, 128, "vllm")
    assert seen[0].save == tmp_path / "trl-1.5b-s0" / "model"


def test_a_run_comes_after_what_it_needs(tmp_path: Path) -> None:
    jobs = chosen(all_jobs(arguments(tmp_path)), ["mopd-student", "algo-gspo-s0"])
    names = [job.name for job in jobs]
    assert names == ["gsm8k-1.5b-s0", "mopd-sums", "mopd-student", "algo-gspo-s0"]
    with pytest.raises(SystemExit, match="no run is called nothing"):
        chosen(all_jobs(arguments(tmp_path)), ["nothing"])


@dataclass(frozen=True)
class Script(Job):
    """A run that is a line of Python in its own folder."""

    line: str = ""

    def command(self, args: argparse.Namespace, work: Path, folder: Path) -> list[str]:
        make = f"import pathlib, time; f = pathlib.Path({str(folder)!r}); f.mkdir(); "
        return [sys.executable, "-c", make + self.line]


def script(name: str, line: str = "pass", work_s: float = 1.0, **others: object) -> Script:
    job = Script(name, (("gsm8k", name),), work_s, 10.0, start_s=0.1, line=line)
    return replace(job, **others)  # type: ignore[arg-type]


def test_what_fails_what_needs_it_and_what_takes_too_long_are_in_the_plan(tmp_path: Path) -> None:
    keeps = "(f / 'checkpoints').mkdir(); (f / 'metrics.jsonl').write_text('{}')"
    jobs = [
        script("first", keeps, alone=True),
        script("teacher", keeps, keep=True),
        script("broken", "raise SystemExit('no memory')"),
        script("pupil", needs=("broken",)),
        script("endless", work_s=1e6),
    ]
    args = arguments(tmp_path)
    Driver(args, jobs, time.monotonic() + 600).go()
    runs = json.loads((tmp_path / "plan.json").read_text())["runs"]
    states = {name: entry["state"] for name, entry in runs.items()}
    assert states == {
        **{"first": "done", "teacher": "done", "broken": "failed"},
        **{"pupil": "cut", "endless": "cut"},
    }
    assert runs["first"]["beside"] == 0
    assert runs["broken"]["why"] == "no memory"
    assert runs["pupil"]["why"] == "not begun: it needs broken"
    assert "too little was left" in runs["endless"]["why"]
    assert not (tmp_path / "first" / "checkpoints").exists()
    assert (tmp_path / "teacher" / "checkpoints").exists()
    with tarfile.open(tmp_path / "out" / "real_models.tar.gz") as archive:
        assert {"plan.json", "first/metrics.jsonl", "broken.log"} <= set(archive.getnames())
    Driver(args, jobs[:2], time.monotonic() + 600).go()  # done already: their folders stay
    assert (tmp_path / "teacher" / "checkpoints").exists()


def test_at_the_deadline_a_run_is_stopped_and_said_to_be(tmp_path: Path) -> None:
    driver = Driver(
        arguments(tmp_path), [script("slow", "time.sleep(600)")], time.monotonic() + 600
    )
    driver._start(driver.jobs[0])
    while not (tmp_path / "slow").exists():
        time.sleep(0.05)
    driver.jobs, driver.deadline = [], time.monotonic()
    driver.go()
    assert driver.entries["slow"]["state"] == "stopped"
