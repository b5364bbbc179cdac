"""What it teaches real models: every learning run of `docs/results`, on one GPU under a deadline.

    python -m benchmarks.real_models --small QWEN_0.5B --large QWEN_1.5B --data GSM8K \\
        --work WORK --out OUT --limit-s 540 [NAME-PATTERN …]

The runs of `benchmarks.real_runs` are started in that order, or in the order of the patterns, as
`ludic train` with the README's `gsm8k.toml`: side by side as far as `--lanes` and the memory allow,
those whose seconds are reported alone. A run that cannot end in time by its estimate is not
begun, and `plan.json` says so; the estimates follow the runs that have ended. At the deadline what
still runs is asked to stop, then killed. Called again with the same WORK it does what is left.

OUT gets `real_models.tar.gz`: `plan.json`, and of every run its settings, metrics and reports.
Weights stay in WORK, and only those that another run needs. `python -m benchmarks.results real
FOLDER` makes the pages of the unpacked archive.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gsm8k import readme_text
from benchmarks.real_runs import Job, all_jobs, write_sums
from benchmarks.series import read_trl

KEPT = ("run.json", "origin.json", "metrics.jsonl", "summary.json", "trl.json", "sft/metrics.jsonl")
STOP_S, KILL_S = 30.0, 8.0
"""How long before the deadline runs are asked to stop, and killed."""


@dataclass
class Running:
    """A run that has been started."""

    job: Job
    process: subprocess.Popen[str]
    log: TextIO
    begun: float
    beside: int = 0
    asked: bool = False


@dataclass
class Driver:
    """Starts runs in order of priority, and keeps the book on them in `plan.json`."""

    args: argparse.Namespace
    jobs: Sequence[Job]
    deadline: float
    running: list[Running] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work: Path = self.args.work.resolve()
        self.file = self.work / "plan.json"
        book = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.entries: dict[str, dict[str, Any]] = book.get("runs", {})

    def go(self) -> None:
        """Runs until all is done or the time is over, then names what was cut."""
        left = [job for job in self.jobs if self._state(job.name) != "done"]
        for job in left:  # of an earlier call
            shutil.rmtree(self.work / job.name, ignore_errors=True)
            self.entries.pop(job.name, None)
        while left or self.running:
            for run in [run for run in self.running if run.process.poll() is not None]:
                self._end(run)
            if self._left_s() > STOP_S:
                while ready := [job for job in left if self._may_start(job, left)]:
                    left.remove(ready[0])
                    self._start(ready[0])
            elif left:
                left = self._cut(left)
            if self._left_s() <= STOP_S:
                self._stop()
            if left and not self.running:
                left = self._cut(left)
            time.sleep(0.2)
        self._save()

    def _state(self, name: str) -> str | None:
        return self.entries.get(name, {}).get("state")

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def estimate_s(self, job: Job) -> float:
        """How long a run takes from now on: as its job says, and in company as the last ones
        took compared with that, or at first 0.6 times as many as there are lanes."""
        if job.alone or self.args.lanes == 1:
            return job.start_s + job.work_s
        usual = 0.6 * self.args.lanes
        pace = statistics.median(self.paces[-5:]) if self.paces else usual
        return job.start_s + max(pace, 1.0) * job.work_s

    def _may_start(self, job: Job, left: Sequence[Job]) -> bool:
        alone = [run for run in self.running if run.job.alone]
        free = self.args.gpu_gb - sum(run.job.gb for run in self.running)
        first = next((other for other in left if self._fits(other) and self._ready(other)), None)
        if not self._ready(job) or not self._fits(job) or alone:
            return False
        if job.alone:
            return not self.running and first is job
        if first is not None and first.alone:
            return False  # it waits for an empty machine
        return len(self.running) < self.args.lanes and (job.gb <= free or not self.running)

    def _ready(self, job: Job) -> bool:
        return all(self._state(name) == "done" for name in job.needs)

    def _fits(self, job: Job) -> bool:
        return self.estimate_s(job) + STOP_S <= self._left_s()

    def _start(self, job: Job) -> None:
        folder = self.work / job.name
        if job.kind != "train":  # `ludic train` makes its own
            folder.mkdir()
        log = (self.work / f"{job.name}.log").open("w", encoding="utf-8")
        env = dict(os.environ, OMP_NUM_THREADS="2", PYTHONUNBUFFERED="1")
        if not job.alone:
            env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        command = job.command(self.args, self.work, folder)
        process = subprocess.Popen(
            *(command,), stdout=log, stderr=subprocess.STDOUT, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip
        self.running.append(Running(job, process, log, time.monotonic()))
        for run in self.running:
            run.beside = max(run.beside, len(self.running) - 1)
        self._note(job, "running", command=shlex.join(["python", *command[1:]]))
        print(
            f"{self._left_s():5.0f} s left: begin {job.name}, with {len(self.running) - 1} others,",
            end="",
        )
        print(f" about {self.estimate_s(job):.0f} s", flush=True)

    def _end(self, run: Running) -> None:
        self.running.remove(run)
        run.log.close()
        job, folder = run.job, self.work / run.job.name
        seconds = time.monotonic() - run.begun
        facts: dict[str, Any] = {"seconds": round(seconds, 1), "beside": run.beside}
        text = (self.work / f"{job.name}.log").read_text(encoding="utf-8", errors="replace")
        if job.kind == "trl":
            _write_trl(folder, job, text)
        if run.asked:
            state, facts["why"] = "stopped", "the time was over before its last evaluation"
        elif run.process.returncode:
            state, facts["why"] = "failed", "\n".join(text.strip().splitlines()[-12:])
        else:
            state = "done"
            if run.beside:
                self.paces.append(max(seconds - job.start_s, 0.0) / job.work_s)
        _drop_weights(folder, keep=job.keep and state == "done")
        self._note(job, state, **facts)
        print(f"{self._left_s():5.0f} s left: {job.name} {state} after {seconds:.0f} s", flush=True)
        if state == "failed":
            print(facts["why"], flush=True)
        self._save()

    def _stop(self) -> None:
        for run in self.running:
            if not run.asked:
                run.asked = True
                run.process.send_signal(signal.SIGINT)
            elif self._left_s() <= KILL_S:
                os.killpg(run.process.pid, signal.SIGKILL)

    def _cut(self, left: Sequence[Job]) -> list[Job]:
        """Notes why each of them was not begun."""
        for job in left:
            missing = [name for name in job.needs if self._state(name) != "done"]
            why = f"not begun: it takes about {self.estimate_s(job):.0f} s, and too little was left"
            if missing:
                why = f"not begun: it needs {', '.join(missing)}"
            self._note(job, "cut", why=why)
            print(f"cut {job.name}: {why}", flush=True)
        return []

    def _note(self, job: Job, state: str, **facts: Any) -> None:
        entry = self.entries.setdefault(job.name, {})
        entry |= {"state": state, "seed": job.seed, "pages": dict(job.pages), **facts}
        book = {"lanes": self.args.lanes, "notes": self.args.note, "runs": self.entries}
        self.file.write_text(json.dumps(book, indent=1) + "\n", encoding="utf-8")

    def _save(self) -> None:
        """Writes the archive with what the pages are made of."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        target = self.args.out / "real_models.tar.gz"
        with tarfile.open(target, "w:gz") as archive:
            archive.add(self.file, "plan.json")
            for name in self.entries:
                folder = self.work / name
                files = [folder / kept for kept in KEPT] + sorted(folder.glob("eval/*.json"))
                for path in (path for path in files if path.is_file()):
                    archive.add(path, path.relative_to(self.work))
                log = self.work / f"{name}.log"
                if log.is_file() and log.stat().st_size < 200_000:
                    archive.add(log, log.name)


def _write_trl(folder: Path, job: Job, text: str) -> None:
    """The updates of TRL's log, as `benchmarks.results` reads them."""
    folder.mkdir(exist_ok=True)
    runs = [{"name": job.label, "seed": job.seed, "points": read_trl(text)}]
    (folder / "trl.json").write_text(json.dumps({"runs": runs}))


def _drop_weights(folder: Path, *, keep: bool) -> None:
    if not keep:
        for part in ("checkpoints", "policy", "model"):
            shutil.rmtree(folder / part, ignore_errors=True)


def chosen(jobs: Sequence[Job], patterns: Sequence[str]) -> list[Job]:
    """The jobs that the patterns name, in the patterns' order, each after what it needs; all that
    are not optional without a pattern."""
    if not patterns:
        patterns = [job.name for job in jobs if not job.optional]
    wanted: dict[str, Job] = {}
    by_name = {job.name: job for job in jobs}
    for pattern in patterns:
        matching = [job for job in jobs if fnmatch(job.name, pattern)]
        if not matching:
            raise SystemExit(f"no run is called {pattern}; there are: {', '.join(by_name)}")
        for job in matching:
            for needed in (*job.needs, job.name):
                wanted.setdefault(needed, by_name[needed])
    return list(wanted.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="*", help="names or patterns of runs, most important first")
    parser.add_argument("--small", required=True, help="the 0.5B, a folder")
    parser.add_argument("--large", required=True, help="the 1.5B, a folder")
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl and test.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="for run folders and weights")
    parser.add_argument("--out", type=Path, required=True, help="for the archive")
    parser.add_argument("--limit-s", type=float, required=True, help="end by then")
    parser.add_argument("--lanes", type=int, default=4, help="runs side by side")
    parser.add_argument("--gpu-gb", type=float, default=146.0, help="their memory, in GiB")
    parser.add_argument("--updates-large", type=int, default=60)
    parser.add_argument("--updates-small", type=int, default=40)
    parser.add_argument("--eval-large", default='"all"', help="eval.episodes of the 1.5B")
    parser.add_argument("--eval-small", default="400", help="eval.episodes of the 0.5B")
    parser.add_argument("--set", action="append", default=[], help="a setting of every run")
    parser.add_argument("--note", action="append", default=[], help="a sentence for the pages")
    parser.add_argument("--list", action="store_true", help="print the runs, and stop")
    args = parser.parse_args(arguments)
    began = time.monotonic()
    jobs = chosen(all_jobs(args), args.run)
    if args.list:
        for job in jobs:
            print(f"{job.name:24} {job.start_s + job.work_s:4.0f} s alone, {job.gb:3.0f} GB")
        return
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "gsm8k.toml").write_text(readme_text(), encoding="utf-8")
    write_sums(args.work)
    Driver(args, jobs, began + args.limit_s).go()


if __name__ == "__main__":
    main()
