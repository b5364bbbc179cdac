"""Would the tests notice? Puts small faults into the core, one at a time, and runs its tests.

    python -m tools.mutation                        # every fault in every target: hours
    python -m tools.mutation --sample 180 --seed 1  # so many, as many of each target as of the next
    python -m tools.mutation --sample 150 --jobs 14 --limit-s 540  # by 14 at once, in 9 minutes
    python -m tools.mutation saw losses             # only targets whose path has one of these words

A fault is a changed operator, comparison, constant or condition. It is put into a copy of the
project, of which every job has one, and the target's tests run there until the first failure:
processes that tests start have the fault, too. Torch and the like are imported once, and every
fault gets a fork. Hypothesis draws the same examples each time, so a figure repeats.

Tests run without any fault first. Those that fail then say nothing, and are left out; a fault that
the others do not notice is "baseline fails", which does not count as noticed. A fault may take five
times as long as the tests took without it. Every fault is a line of its own; some change nothing
that a test here could see: `UNSEEN` names them with the reason. The last line is JSON: `faults`,
`cut` (not tried by `--limit-s`), `noticed`, `timed_out` (counted as noticed), `baseline_fails`,
`unseen`, `rate` (noticed of those that were tried and are not in `UNSEEN`), for each target how
many were noticed and tried, and the tests that fail without a fault.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tools.mutation_targets import TARGETS, UNSEEN

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ludic"

_PRELOADED = (
    *("torch", "torch._dynamo", "transformers", "peft", "numpy", "safetensors.torch"),
    *("hypothesis", "pytest", "pytest_asyncio", "pytest_timeout", "jaxtyping", "beartype"),
    *("pydantic", "msgspec"),
)
_COPIED = ("benchmarks", "docs", "examples", "src", "tests", "tools")
Verdict = Literal["noticed", "missed", "timed out", "baseline fails", "cut"]
_NOTICED = ("noticed", "timed out")


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one node: `number` counts the nodes that can be changed in the file. `text` is
    the line it is in, white space folded."""

    path: str
    number: int
    line: int
    what: str
    text: str


_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


class Mutator(ast.NodeTransformer):
    """Walks a module in order, counts what could be changed, and changes the chosen one."""

    def __init__(self, chosen: int = -1) -> None:
        self.chosen, self.found = chosen, list[tuple[int, str]]()

    def _is_chosen(self, node: Any, what: str) -> bool:
        self.found.append((node.lineno, what))
        return len(self.found) - 1 == self.chosen

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node  # a message's wording is not behaviour

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]
        defaults = [d if d is None else self.visit(d) for d in node.args.kw_defaults]
        node.args.kw_defaults = defaults
        node.args.defaults = [self.visit(d) for d in node.args.defaults]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]  # not its decorators
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self.visit_FunctionDef(node)  # type: ignore[arg-type]

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        swap = _COMPARE[type(node.ops[0])]
        if self._is_chosen(node, f"{type(node.ops[0]).__name__} -> {swap.__name__}"):
            node.ops = [swap(), *node.ops[1:]]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        swap = _ARITHMETIC.get(type(node.op))
        if swap and self._is_chosen(node, f"{type(node.op).__name__} -> {swap.__name__}"):
            node.op = swap()
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        swap = _ARITHMETIC.get(type(node.op))
        if swap and self._is_chosen(node, f"{type(node.op).__name__}= -> {swap.__name__}="):
            node.op = swap()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node, "and <-> or"):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not | ast.USub) and self._is_chosen(node, "sign or not gone"):
            return node.operand
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return node
        self.generic_visit(node)
        if not isinstance(node.test, ast.Compare | ast.UnaryOp) and self._is_chosen(
            node, "condition turned round"
        ):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node, "branches exchanged"):
            node.body, node.orelse = node.orelse, node.body
        return node

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        return ast.Break() if self._is_chosen(node, "continue -> break") else node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._is_chosen(node, f"{node.value} -> {not node.value}"):
                return ast.Constant(not node.value)
        elif isinstance(node.value, int | float) and self._is_chosen(
            node, f"{node.value} -> {node.value + 1}"
        ):
            return ast.Constant(node.value + 1)
        return node


def mutated(source: str, number: int) -> str:
    """A module's source with its fault of that number in it."""
    return ast.unparse(ast.fix_missing_locations(Mutator(number).visit(ast.parse(source))))


def faults(path: str) -> list[Fault]:
    """Every fault that can be put into a file."""
    source = (SOURCE / path).read_text(encoding="utf-8")
    lines, mutator = source.splitlines(), Mutator()
    mutator.visit(ast.parse(source))
    return [
        Fault(path, n, line, what, " ".join(lines[line - 1].split()))
        for n, (line, what) in enumerate(mutator.found)
    ]


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


class Trial:
    """Tries faults in a copy of the project. `shared` is a folder that trials have in common, so
    that tests run without a fault only once; nothing is begun after `deadline` (monotonic)."""

    def __init__(
        self, copy: Path, shared: Path, *, timeout_s: float, deadline: float = math.inf
    ) -> None:
        self.copy, self.shared = copy, shared
        self.timeout_s, self.deadline = timeout_s, deadline

    def verdict(self, fault: Fault, tests: Sequence[str]) -> Verdict:
        """Runs the tests one after another until one notices the fault."""
        original = (self.copy / "src" / "ludic" / fault.path).read_text(encoding="utf-8")
        faulty, incomplete = mutated(original, fault.number), False
        for place, test in enumerate(tests):
            arguments = [test, *(f"--ignore={earlier}" for earlier in tests[:place])]
            baseline = self._baseline(arguments)
            if baseline is None:
                return "cut"
            seconds, failing = baseline
            incomplete |= bool(failing)
            if test in failing:
                continue
            without = [f"--{'deselect' if '::' in each else 'ignore'}={each}" for each in failing]
            limit_s = min(self.timeout_s, 30 + 5 * seconds)
            write(self.copy, fault.path, faulty)
            verdict = self._run(["-x", *arguments, *without], limit_s)
            write(self.copy, fault.path, original)
            if verdict != "missed":
                return verdict
        return "baseline fails" if incomplete else "missed"

    def _baseline(self, arguments: Sequence[str]) -> tuple[float, list[str]] | None:
        """How long the tests take without a fault, and which fail; None at the deadline."""
        name = hashlib.sha256(" ".join(arguments).encode()).hexdigest()
        file = self.shared / f"{name}.json"
        if not file.exists():
            report, began = self.copy / "failed.json", time.monotonic()
            report.unlink(missing_ok=True)
            if self._run(arguments, self.timeout_s, report) == "cut":
                return None
            seconds = time.monotonic() - began
            # Without a report the tests never came to an end, and none of them can be used.
            failing = json.loads(report.read_text()) if report.exists() else [arguments[0]]
            whole = file.with_suffix(f".{os.getpid()}")
            whole.write_text(json.dumps((seconds, failing)))
            whole.rename(file)
        seconds, failing = json.loads(file.read_text())
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
        jobs = ProcessPoolExecutor(
            args.jobs,
            multiprocessing.get_context("fork"),
            _begin_job,
            (Path(folder), args.timeout, deadline),
        )
        with jobs:
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


def _try_one(fault: Fault) -> tuple[Verdict, float]:
    began = time.monotonic()
    return _trial.verdict(fault, TARGETS[fault.path]), time.monotonic() - began


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
        fault, (verdict, seconds) = tried[done], done.result()
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
