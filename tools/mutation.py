"""Would the tests notice? Puts small faults into the core, one at a time, and runs its tests.

    python -m tools.mutation                        # every fault in every target: hours
    python -m tools.mutation --sample 100 --seed 1  # a hundred of them, drawn evenly
    python -m tools.mutation saw losses             # only targets whose path has one of these words

A fault is a changed operator, comparison, constant or condition. Torch and the like are imported
once; then every fault gets a fork in which the module is compiled with the fault in it and the
target's tests run until the first failure. A fault that no test notices is printed as it would
stand in the source. Some change nothing that can be seen: `EQUIVALENT` names them with the reason.
The last line is JSON: `faults`, `noticed`, `equivalent`, `rate` (of those that are not equivalent).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ludic"

TARGETS: dict[str, tuple[str, ...]] = {
    "saw/assembly.py": ("tests/saw",),
    "saw/batch.py": ("tests/saw",),
    "saw/building.py": ("tests/saw",),
    "saw/codec.py": ("tests/saw",),
    "saw/filters.py": ("tests/saw",),
    "saw/grouping.py": ("tests/saw",),
    "saw/statistics.py": ("tests/saw",),
    "saw/trainable.py": ("tests/saw", "tests/inference/test_sampling.py"),
    "training/preprocess.py": (
        "tests/training/test_preprocess.py",
        "tests/training/test_one_way.py",
    ),
    "training/credit_assignment/returns.py": (
        "tests/training/credit_assignment",
        "tests/training/test_algorithms.py",
    ),
    "training/credit_assignment/value_tracker.py": ("tests/training/credit_assignment",),
    "training/losses/aggregation.py": ("tests/training/losses",),
    "training/losses/composite.py": ("tests/training/losses",),
    "training/losses/corrections.py": ("tests/training/losses",),
    "training/losses/kl.py": ("tests/training/losses",),
    "training/losses/policy_ratio.py": ("tests/training/losses",),
    "training/update/layout.py": ("tests/training/update",),
    "training/update/packing.py": ("tests/training/update",),
    "training/update/planning.py": ("tests/training/update",),
    "training/update/sharing.py": ("tests/training/update",),
    "training/update/passes.py": ("tests/training/test_trainer.py", "tests/training/test_drift.py"),
    "training/update/optimizer.py": ("tests/training/update/test_optimizer.py",),
    "training/update/schedule.py": (
        "tests/training/update/test_optimizer.py",
        "tests/training/test_trainer.py",
    ),
    "training/checkpoints/checkpoint.py": ("tests/training/checkpoints",),
    "training/checkpoints/contents.py": ("tests/training/checkpoints",),
    "training/checkpoints/state_shards.py": ("tests/training/checkpoints",),
    "rollouts/planning.py": ("tests/rollouts/test_planning.py", "tests/rollouts/test_engine.py"),
    "interaction/collector.py": ("tests/interaction",),
}

EQUIVALENT: dict[tuple[str, str], str] = {}
"""(file, the line with the fault, white space folded) -> why no test could notice."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one node: `number` counts the nodes that can be changed in the file."""

    path: str
    number: int
    line: int
    what: str


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


def mutated(path: str, number: int) -> ast.Module:
    """The module's tree with its fault of that number in it."""
    tree = ast.parse((SOURCE / path).read_text(encoding="utf-8"))
    changed: ast.Module = ast.fix_missing_locations(Mutator(number).visit(tree))
    return changed


def faults(path: str) -> list[Fault]:
    """Every fault that can be put into a file."""
    mutator = Mutator()
    mutator.visit(ast.parse((SOURCE / path).read_text(encoding="utf-8")))
    return [Fault(path, n, line, what) for n, (line, what) in enumerate(mutator.found)]


class _Faulty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module and loads it with the fault in it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.name = "ludic." + fault.path.removesuffix(".py").replace("/", ".")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        origin = str(SOURCE / self.fault.path)
        return importlib.machinery.ModuleSpec(name, self, origin=origin)

    def exec_module(self, module: ModuleType) -> None:
        origin = str(SOURCE / self.fault.path)
        module.__file__ = origin
        exec(compile(mutated(self.fault.path, self.fault.number), origin, "exec"), module.__dict__)


def is_noticed(fault: Fault | None, tests: Sequence[str], timeout_s: float) -> bool:
    """Runs the tests in a fork, with the fault in it if there is one. Too long counts as noticed,
    since a fault that hangs is one that a person would see."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            if fault is not None:
                finder = _Faulty(fault)
                sys.meta_path.insert(0, finder)
                # At once: the tests put a finder of their own in front, which checks shapes.
                importlib.import_module(finder.name)
            import pytest

            options = ["-x", "-q", "-p", "no:xdist"]
            status = pytest.main([*options, *tests])
            os._exit(0 if status == pytest.ExitCode.OK else 1)
        except BaseException:
            os._exit(1)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def folded_line(fault: Fault) -> str:
    """The source line of the fault, white space folded."""
    return " ".join(
        (SOURCE / fault.path).read_text(encoding="utf-8").splitlines()[fault.line - 1].split()
    )


def chosen_faults(words: Sequence[str], sample: int | None, seed: int) -> list[Fault]:
    """The faults to try; a sample is drawn evenly over all of them."""
    paths = [p for p in TARGETS if not words or any(word in p for word in words)]
    found = [fault for path in paths for fault in faults(path)]
    if sample is None or sample >= len(found):
        return found
    return sorted(
        random.Random(seed).sample(found, sample), key=lambda f: (paths.index(f.path), f.number)
    )


def survivors(found: Sequence[Fault], timeout_s: float) -> Iterator[Fault]:
    """The faults that no test notices, as they are found."""
    for number, fault in enumerate(found, start=1):
        noticed = is_noticed(fault, TARGETS[fault.path], timeout_s)
        print(f"\r{number}/{len(found)} {fault.path}", end="", file=sys.stderr, flush=True)
        if not noticed:
            yield fault


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 when tests do not pass without a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only targets whose path has one of these")
    parser.add_argument("--sample", type=int, help="that many faults, drawn evenly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one fault")
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "src"))
    found = chosen_faults(args.words, args.sample, args.seed)
    for heavy in ("torch", "transformers", "numpy", "hypothesis", "pytest"):
        __import__(heavy)
    for tests in sorted({TARGETS[fault.path] for fault in found}):
        if is_noticed(None, tests, 10 * args.timeout):
            print(f"{' '.join(tests)} fail without any fault: mend them first", file=sys.stderr)
            return 1
    missed, equivalent = 0, 0
    for fault in survivors(found, args.timeout):
        reason = EQUIVALENT.get((fault.path, folded_line(fault)))
        equivalent += reason is not None
        missed += reason is None
        mark = f"equivalent, {reason}" if reason else "NOT NOTICED"
        print(f"\n{fault.path}:{fault.line}: {fault.what}: {mark}\n    {folded_line(fault)}")
    real = len(found) - equivalent
    figures = {
        "faults": len(found),
        "noticed": real - missed,
        "equivalent": equivalent,
        "rate": round((real - missed) / max(real, 1), 4),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
