"""Would the tests notice? Puts small faults into the core, one at a time, and runs its tests.

    python -m tools.mutation                        # every fault in every target: hours
    python -m tools.mutation --sample 180 --seed 1  # so many, as many of each target as of the next
    python -m tools.mutation --sample 150 --jobs 14 --limit-s 540  # by 14 at once, in 9 minutes
    python -m tools.mutation saw losses             # only targets whose path has one of these words

A fault is a changed operator, comparison, constant or condition. It is put into a copy of the
project, of which every job has one, and test files run there until the first failure: those that
`TARGETS` names for the module, then all others that import it, the quickest first. Processes that
tests start have the fault, too. Torch and the like are imported once, and every file gets a fork.
Hypothesis draws the same examples each time, so a figure repeats.

Every file runs without any fault first. Tests that fail then (for want of a program or a model,
perhaps) say nothing, and are left out. A fault that the others do not notice is "baseline fails",
with the names of what was left out; it does not count as noticed. A fault may take five times as
long as the tests took without it. Every fault is a line of its own; some change nothing that a test
here could see: `UNSEEN` names them with the reason. The last line is JSON: `faults`, `cut` (not
tried by `--limit-s`), `noticed`, `timed_out` (counted as noticed), `baseline_fails`, `unseen`,
`rate` (noticed of those that were tried and are not in `UNSEEN`), for each target how many were
noticed and tried, and the tests that fail without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tools.mutation_faults import ROOT, Fault, faults, mutated
from tools.mutation_targets import TARGETS
from tools.mutation_unseen import UNSEEN

_PRELOADED = (
    *("torch", "torch._dynamo", "transformers", "peft", "numpy", "safetensors.torch"),
    *("hypothesis", "pytest", "pytest_asyncio", "pytest_timeout", "jaxtyping", "beartype"),
    *("pydantic", "msgspec"),
)
_COPIED = ("benchmarks", "docs", "examples", "src", "tests", "tools")
Verdict = Literal["noticed", "missed", "timed out", "baseline fails", "cut"]
_NOTICED = ("noticed", "timed out")


def copy_of_project(folder: Path) -> Path:
    """A copy to put faults into; what is large and downloaded stays where it is."""
    copy = folder / "project"
    ignored = shutil.ignore_patterns("__pycache__")
    copy.mkdir(parents=True)
    for file in ROOT.iterdir():
        if file.name in _COPIED:
            shutil.copytree(file, copy / file.name, symlinks=True, ignore=ignored)
        elif file.is_file():
            shutil.copy2(file, copy)
    (copy / ".cache").mkdir()
    for cached in (ROOT / ".cache").glob("smollm2*"):
        (copy / ".cache" / cached.name).symlink_to(cached.resolve())
    return copy


def write(copy: Path, path: str, text: str) -> None:
    """Writes a source file of the copy. Bytecode knows only the second that a file is of."""
    file = copy / "src" / "ludic" / path
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()
    file.write_text(text, encoding="utf-8")


@cache
def tests_of(path: str) -> tuple[list[str], list[str]]:
    """The test files that judge a module's faults: those named for it, and the others, which are
    in a folder named for it or import it."""
    package, _, name = f"ludic.{path.removesuffix('.py').replace('/', '.')}".rpartition(".")
    imports = re.compile(
        rf"{re.escape(package)}\.{name}\b"
        rf"|from {re.escape(package)} import (?:\([^)]*|[^\n]*)\b{name}\b"
    )
    files = {f.relative_to(ROOT).as_posix(): f for f in sorted((ROOT / "tests").rglob("test_*.py"))}
    named = [test for test in TARGETS[path] if test in files]
    folders = tuple(f"{test}/" for test in TARGETS[path] if test not in files)
    inside = [name for name in files if name.startswith(folders)]
    importing = [name for name, file in files.items() if imports.search(file.read_text("utf-8"))]
    return named, [name for name in dict.fromkeys([*inside, *importing]) if name not in named]


class Trial:
    """Tries faults in a copy of the project. `shared` is a folder that trials have in common, so
    that tests run without a fault only once; nothing is begun after `deadline` (monotonic)."""

    def __init__(
        self, copy: Path, shared: Path, *, timeout_s: float, deadline: float = math.inf
    ) -> None:
        self.copy, self.shared = copy, shared
        self.timeout_s, self.deadline = timeout_s, deadline

    def verdict(
        self, fault: Fault, named: Sequence[str], others: Sequence[str] = ()
    ) -> tuple[Verdict, list[str]]:
        """Runs one test file after another until one notices the fault: those `named` in their
        order, then the `others`, the quickest first. Also returns the tests that were left out."""
        original = (self.copy / "src" / "ludic" / fault.path).read_text(encoding="utf-8")
        faulty, left_out = mutated(original, fault.number), list[str]()
        for file in self._in_order(named, others):
            baseline = self._baseline(file)
            if baseline is None:
                return "cut", left_out
            seconds, failing = baseline
            left_out += failing
            if file in failing:
                continue
            without = [f"--deselect={test}" for test in failing]
            limit_s = min(self.timeout_s, 30 + 5 * seconds)
            write(self.copy, fault.path, faulty)
            verdict = self._run(["-x", file, *without], limit_s)
            write(self.copy, fault.path, original)
            if verdict != "missed":
                return verdict, left_out
        return "baseline fails" if left_out else "missed", left_out

    def _in_order(self, named: Sequence[str], others: Sequence[str]) -> Iterator[str]:
        yield from named
        waiting = list(others)
        while waiting:  # other jobs measure files meanwhile
            file = min(waiting, key=self._seconds)
            waiting.remove(file)
            yield file

    def _seconds(self, file: str) -> float:
        """How long a file took without a fault; those that nobody has measured come last."""
        report = self._report(file)
        return float(json.loads(report.read_text())[0]) if report.exists() else math.inf

    def _report(self, file: str) -> Path:
        return self.shared / f"{hashlib.sha256(file.encode()).hexdigest()}.json"

    def _baseline(self, file: str) -> tuple[float, list[str]] | None:
        """How long the file takes without a fault, and which of its tests fail, the file itself
        where none can be used; None at the deadline."""
        report = self._report(file)
        if not report.exists():
            failed, began = self.copy / "failed.json", time.monotonic()
            failed.unlink(missing_ok=True)
            if self._run([file], self.timeout_s, failed) == "cut":
                return None
            seconds = time.monotonic() - began
            # Without a report the tests never came to an end.
            failing = json.loads(failed.read_text()) if failed.exists() else [file]
            whole = report.with_suffix(f".{os.getpid()}")
            whole.write_text(json.dumps((seconds, failing)))
            whole.rename(report)
        seconds, failing = json.loads(report.read_text())
        return seconds, failing

    def _run(
        self, arguments: Sequence[str], timeout_s: float, report: Path | None = None
    ) -> Verdict:
        if time.monotonic() >= self.deadline:
            return "cut"
        child = os.fork()
        if child == 0:
            _run_tests(arguments, timeout_s, self.copy, report)
        end = time.monotonic() + timeout_s
        while time.monotonic() < min(end, self.deadline):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return "noticed" if status else "missed"
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):  # it has not called setsid yet
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "timed out" if end <= self.deadline else "cut"


class _Failures:
    """Notes the tests that fail, and the files that cannot be imported."""

    def __init__(self) -> None:
        self.failed = dict[str, None]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    pytest_collectreport = pytest_runtest_logreport


def _run_tests(arguments: Sequence[str], timeout_s: float, copy: Path, report: Path | None) -> None:
    """Ends this process: with 0 if the tests pass."""
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.chdir(copy)
        elsewhere = {str(ROOT), str(ROOT / "src"), ""}
        sys.path[:] = [str(copy / "src"), str(copy), *(p for p in sys.path if p not in elsewhere)]
        path = [str(copy / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ |= {
            "PYTHONPATH": os.pathsep.join(p for p in path if p not in elsewhere),
            "LUDIC_HYPOTHESIS_PROFILE": "mutation",
        }
        import pytest
        from hypothesis import HealthCheck, Phase, settings

        settings.register_profile(
            "mutation",
            deadline=None,
            derandomize=True,
            phases=(Phase.explicit, Phase.generate),  # a failure is enough: no smaller one
            suppress_health_check=[HealthCheck.too_slow],
        )
        options = ["-q", "-p", "no:xdist", "-o", f"timeout={timeout_s}"]
        failures = _Failures()
        status = pytest.main([*options, *arguments], plugins=[failures])
        if report is not None:
            report.write_text(json.dumps(list(failures.failed)))
        # Nothing is left to run where all that there was fails without a fault.
        passed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        os._exit(0 if status in passed else 1)
    except BaseException:
        os._exit(1)


def chosen_faults(words: Sequence[str], sample: int | None, seed: int) -> list[Fault]:
    """The faults to try; a sample has as many of each target as of the next, while there are."""
    paths = [p for p in TARGETS if not words or any(word in p for word in words)]
    found = {path: faults(path) for path in paths}
    if sample is None:
        sample = sum(map(len, found.values()))
    drawing = random.Random(seed)
    for each in found.values():
        drawing.shuffle(each)
    by_turns = [
        found[path][turn]
        for turn in range(max(map(len, found.values()), default=0))
        for path in drawing.sample(paths, len(paths))
        if turn < len(found[path])
    ]
    return by_turns[:sample]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only targets whose path has one of these")
    parser.add_argument("--sample", type=int, help="that many faults, spread over the targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with its own copy")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for one fault and one of its tests"
    )
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, help="seconds for all; the rest is not tried"
    )
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.limit_s
    chosen = chosen_faults(args.words, args.sample, args.seed)
    _preload()
    with tempfile.TemporaryDirectory() as folder:
        how = (Path(folder), args.timeout, deadline)
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(args.jobs, fork, _begin_job, how) as jobs:
            print(json.dumps(_try_all(chosen, jobs) | {"failing": _failing(Path(folder))}))
    return 0


def _preload() -> None:
    """Imports what tests import, on one thread and without a GPU as in tests/conftest.py."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(Path("/dev").glob("nvidia*")):
        os.environ["TRITON_INTERPRET"] = "1"
    if missing := [name for name in _PRELOADED if find_spec(name.partition(".")[0]) is None]:
        raise SystemExit(f"the tests need packages that are not here: {', '.join(missing)}")
    for heavy in _PRELOADED:
        importlib.import_module(heavy)
    gc.freeze()  # what is here stays: forks need not look through it


_trial: Trial
"""This job's."""


def _begin_job(folder: Path, timeout_s: float, deadline: float) -> None:
    global _trial
    copy = copy_of_project(folder / str(os.getpid()))
    _trial = Trial(copy, folder, timeout_s=timeout_s, deadline=deadline)


def _try_one(fault: Fault) -> tuple[Verdict, list[str], float]:
    began = time.monotonic()
    return *_trial.verdict(fault, *tests_of(fault.path)), time.monotonic() - began


def _failing(folder: Path) -> list[str]:
    """The tests that fail without a fault."""
    reports = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return sorted({test for _, failing in reports for test in failing})


def _try_all(chosen: Sequence[Fault], jobs: Executor) -> dict[str, Any]:
    """Prints every fault with its verdict as it comes; returns the figures."""
    verdicts = Counter[str]()
    targets: dict[str, list[int]] = {}
    tried = {}
    for fault in chosen:
        if reason := UNSEEN.get((fault.path, fault.text, fault.what)):
            verdicts["unseen"] += 1
            print(f"{fault.path}:{fault.line}: {fault.what}: unseen, {reason}", flush=True)
        else:
            tried[jobs.submit(_try_one, fault)] = fault
    for number, done in enumerate(as_completed(tried), start=1):
        fault, (verdict, left_out, seconds) = tried[done], done.result()
        verdicts[verdict] += 1
        if verdict == "cut":
            continue
        counts = targets.setdefault(fault.path, [0, 0])
        counts[0] += verdict in _NOTICED
        counts[1] += 1
        print(
            f"{number}/{len(tried)} {fault.path}:{fault.line}: {fault.what}: "
            f"{verdict if verdict == 'noticed' else verdict.upper()} ({seconds:.0f} s)",
            *([] if verdict == "noticed" else [f"    {fault.text}"]),
            *(f"    left out: {test}" for test in left_out if verdict == "baseline fails"),
            sep="\n",
            flush=True,
        )
    noticed = sum(verdicts[each] for each in _NOTICED)
    return {
        "faults": len(chosen),
        "cut": verdicts["cut"],
        "noticed": noticed,
        "timed_out": verdicts["timed out"],
        "baseline_fails": verdicts["baseline fails"],
        "unseen": verdicts["unseen"],
        "rate": round(noticed / max(len(tried) - verdicts["cut"], 1), 4),
        "targets": {path: f"{n}/{of}" for path, (n, of) in sorted(targets.items())},
    }


if __name__ == "__main__":
    raise SystemExit(main())
