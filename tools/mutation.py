"""Would the tests notice? Puts small faults into the core, one at a time, and runs its tests.

    python -m tools.mutation                        # every fault in every target: hours
    python -m tools.mutation --sample 180 --seed 1  # so many, as many of each target as of the next
    python -m tools.mutation saw losses             # only targets whose path has one of these words

A fault is a changed operator, comparison, constant or condition. It is put into a copy of the
project, in which the target's tests run until the first failure: processes that tests start have
the fault, too. Torch and the like are imported once, and every fault gets a fork. Hypothesis draws
the same examples each time, so a figure repeats. A fault that no test notices is printed with its
line. Some change nothing that a test here could see: `UNSEEN` names them with the reason. The last
line is JSON: `faults`, `noticed`, `timed_out` (counted as noticed), `unseen`, `rate` (of those that
are not in `UNSEEN`), and for each target how many were noticed and tried.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tools.mutation_targets import TARGETS, UNSEEN

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ludic"

_PRELOADED = (
    *("torch", "torch._dynamo", "transformers", "peft", "numpy", "safetensors.torch"),
    *("hypothesis", "pytest", "pytest_asyncio", "jaxtyping", "pydantic", "msgspec"),
)
Verdict = Literal["noticed", "missed", "timed out"]


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
    ignored = shutil.ignore_patterns(".git", ".venv*", ".cache", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
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
    """Tries faults in a copy of the project. Tests that notice one are run without it, too, once:
    if they fail then as well, they say nothing."""

    def __init__(self, copy: Path, timeout_s: float) -> None:
        self.copy, self.timeout_s = copy, timeout_s
        self._passing = set[str]()

    def verdict(self, fault: Fault, tests: Sequence[str]) -> Verdict:
        """Runs the tests one after another until one notices the fault."""
        original = (self.copy / "src" / "ludic" / fault.path).read_text(encoding="utf-8")
        faulty = mutated(original, fault.number)
        for place, test in enumerate(tests):
            arguments = [test, *(f"--ignore={earlier}" for earlier in tests[:place])]
            write(self.copy, fault.path, faulty)
            found = _verdict_of(arguments, self.timeout_s, self.copy)
            write(self.copy, fault.path, original)
            if found != "missed":
                self._check(test, arguments)
                return found
            self._passing.add(test)
        return "missed"

    def _check(self, test: str, arguments: Sequence[str]) -> None:
        if test not in self._passing:
            if _verdict_of(arguments, self.timeout_s, self.copy) != "missed":
                raise RuntimeError(f"{test} fails without any fault: mend it first")
            self._passing.add(test)


def _verdict_of(arguments: Sequence[str], timeout_s: float, copy: Path) -> Verdict:
    child = os.fork()
    if child == 0:
        _run_tests(arguments, timeout_s, copy)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "noticed" if status else "missed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"


def _run_tests(arguments: Sequence[str], timeout_s: float, copy: Path) -> None:
    """Ends this process: with 0 if the tests pass."""
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.chdir(copy)
        elsewhere = {str(ROOT), str(ROOT / "src"), ""}
        sys.path[:] = [str(copy / "src"), str(copy), *(p for p in sys.path if p not in elsewhere)]
        os.environ |= {
            "PYTHONPATH": str(copy / "src"),
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
        options = ["-x", "-q", "-p", "no:xdist", "-o", f"timeout={timeout_s}"]
        status = pytest.main([*options, *arguments])
        os._exit(0 if status == pytest.ExitCode.OK else 1)
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
    return sorted(by_turns[:sample], key=lambda f: (paths.index(f.path), f.number))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only targets whose path has one of these")
    parser.add_argument("--sample", type=int, help="that many faults, spread over the targets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for one fault and one of its tests"
    )
    args = parser.parse_args(argv)
    found = chosen_faults(args.words, args.sample, args.seed)
    # As in tests/conftest.py, which comes too late here.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not any(Path("/dev").glob("nvidia*")):
        os.environ["TRITON_INTERPRET"] = "1"
    for heavy in _PRELOADED:
        importlib.import_module(heavy)
    gc.freeze()  # what is here stays: forks need not look through it
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(copy_of_project(Path(folder)), args.timeout)
        print(json.dumps(_try_all(found, trial)))
    return 0


def _try_all(found: Sequence[Fault], trial: Trial) -> dict[str, Any]:
    """Prints every fault that is not noticed; returns the figures."""
    noticed, timed_out, unseen = 0, 0, 0
    targets: dict[str, list[int]] = {}
    for number, fault in enumerate(found, start=1):
        print(f"{number}/{len(found)} {fault.path}:{fault.line}", file=sys.stderr, flush=True)
        reason = UNSEEN.get((fault.path, fault.text, fault.what))
        how = trial.verdict(fault, TARGETS[fault.path]) if reason is None else "missed"
        if how != "noticed":
            mark = f"unseen, {reason}" if reason else how.upper()
            print(f"{fault.path}:{fault.line}: {fault.what}: {mark}\n    {fault.text}")
            sys.stdout.flush()
        timed_out += how == "timed out"
        if reason is not None:
            unseen += 1
            continue
        noticed += how != "missed"
        counts = targets.setdefault(fault.path, [0, 0])
        counts[0] += how != "missed"
        counts[1] += 1
    return {
        "faults": len(found),
        "noticed": noticed,
        "timed_out": timed_out,
        "unseen": unseen,
        "rate": round(noticed / max(len(found) - unseen, 1), 4),
        "targets": {path: f"{counts[0]}/{counts[1]}" for path, counts in targets.items()},
    }


if __name__ == "__main__":
    raise SystemExit(main())
