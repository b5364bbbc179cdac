"""Runs the benchmarks that fit this machine, one after another, and gathers their figures.

Every other module of this folder is a benchmark, unless it has no `main`. It runs alone as
`python -m benchmarks.NAME`, takes no network, and prints one JSON object as its last line. A
benchmark with needs says so in a module-level constant: `NEEDS = ("gpu",)`, `("vllm",)`,
`("redis",)`, the name of any importable package, or `("bwrap",)`, a program; it is skipped, with
the reason, where they are not met. The last line of this program is one JSON object too: the
figures by benchmark.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
DEADLINE_S = 1800


@dataclass(frozen=True)
class Benchmark:
    """One module, what it is about, and what it needs."""

    name: str
    about: str
    needs: tuple[str, ...]

    def lacks(self) -> list[str]:
        """Those of its needs that this machine does not meet."""
        return [need for need in self.needs if not is_met(need)]


def is_met(need: str) -> bool:
    """Whether this machine has a GPU, the program bwrap, or the named package."""
    if need == "bwrap":
        return shutil.which(need) is not None
    if need != "gpu":
        return importlib.util.find_spec(need) is not None
    import torch

    return torch.cuda.is_available()


def discover(folder: Path = FOLDER) -> list[Benchmark]:
    """The benchmarks of a folder, read without importing them."""
    found = []
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if path.stem in ("__init__", "run_all") or "main" not in names:
            continue
        about = (ast.get_docstring(tree) or "").partition("\n")[0]
        found.append(Benchmark(path.stem, about, constant(tree, "NEEDS", ())))
    return found


def constant(tree: ast.Module, name: str, default: Any) -> Any:
    """The literal value of a module-level constant."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    return default


def last_json(text: str) -> Mapping[str, Any]:
    """The JSON object on the last line that is not empty; `ValueError` where there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("it printed nothing")
    figures = json.loads(lines[-1])
    if not isinstance(figures, dict):
        raise ValueError(f"its last line is not a JSON object: {lines[-1][:80]}")
    return figures


def run(name: str, deadline_s: float) -> Mapping[str, Any]:
    """Runs one benchmark in a process of its own and returns its figures."""
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"not done after {deadline_s:.0f} s") from None
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        raise ValueError(f"exit status {done.returncode}")
    return last_json(done.stdout)


def main() -> int:
    """The command line; the exit status is 1 when a benchmark failed."""
    parser = argparse.ArgumentParser(description="Run the benchmarks that fit this machine.")
    parser.add_argument("names", nargs="*", help="run only these")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="for each of them")
    args = parser.parse_args()
    benchmarks = discover()
    if unknown := set(args.names) - {b.name for b in benchmarks}:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    figures: dict[str, Mapping[str, Any]] = {}
    failures: list[str] = []
    for benchmark in benchmarks:
        if args.names and benchmark.name not in args.names:
            continue
        print(f"==> {benchmark.name}: {benchmark.about}", flush=True)
        if lacking := benchmark.lacks():
            print(f"    skipped: this machine has no {', '.join(lacking)}")
            continue
        if args.list:
            continue
        start = time.perf_counter()
        try:
            figures[benchmark.name] = run(benchmark.name, args.deadline_s)
        except ValueError as exc:
            failures.append(benchmark.name)
            print(f"    FAILED: {exc}")
        print(f"    took {time.perf_counter() - start:.0f} s", flush=True)
    if failures:
        print(f"==> failed: {', '.join(failures)}")
    print(json.dumps(figures))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
