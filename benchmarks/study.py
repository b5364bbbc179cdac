"""How soon a reward comes: SmolLM2 learns sums by `ludic train`, in every precision, beside TRL.

    python -m benchmarks.study run --model PATH --out FOLDER      # on a GPU
    python -m benchmarks.study page FOLDER docs/results           # tables and curves from it

Every run is the real command with a run file, one at a time. A reward is reached at the first
update from which the mean of three is at least that; seconds count from the start of the first
update, its compilation included. A cut completion is a failure with reward 0 for both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

GOALS = (0.5, 0.75, 0.9)
RUN_FILE = """schema = 1
[run]
name = "sums"
[model]
name = "{model}"
device = "{device}"
[inference]
slots = 512
max_context_tokens = 256
[inference.sampling]
max_tokens = 24
[env]
kind = "benchmarks.sums:Sums"
[protocol]
kind = "single_agent"
[protocol.kwargs]
parser = {{ kind = "text", error_reward = 0.0 }}
[algorithm]
name = "grpo"
kwargs = {{ group_size = 16 }}
[training]
rollouts_per_update = 512
concurrency = 512
max_steps = 1
learning_rate = 1e-5
max_seq_len = 256
[eval]
episodes = 64
"""


class Point(NamedTuple):
    """One update: when it was done, and the mean reward of its episodes."""

    seconds: float
    reward: float


def ludic(work: Path, name: str, overrides: Sequence[str], seed: int, updates: int) -> list[Point]:
    """One run of the command; returns its updates."""
    folder = work / f"ludic-{name}-{seed}"
    command = [sys.executable, "-m", "ludic.cli", "train", str(work / "sums.toml")]
    command += ["--out", str(folder), f"run.seed={seed}", f"training.steps={updates}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/reward_mean" in line]
    return [Point(line["perf/elapsed_s"], line["train/reward_mean"]) for line in steps]


def trl(model: str, device: str, precision: str, seed: int, updates: int) -> list[Point]:
    """The same by TRL."""
    command = [sys.executable, "-m", "benchmarks.trl_loop", "--model", model, "--device", device]
    command += ["--precision", precision, "--seed", str(seed), "--updates", str(updates)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}")
    points, elapsed = [], 0.0
    for line in done.stdout.splitlines():
        if line.startswith('{"step"'):
            update = json.loads(line)
            elapsed += update["seconds"]
            points.append(Point(elapsed, update["reward"]))
    return points


def reached(points: Sequence[Point], goal: float) -> tuple[int, float] | None:
    """Returns the update, counted from 1, and the seconds at which the goal was reached."""
    for i in range(2, len(points)):
        if sum(p.reward for p in points[i - 2 : i + 1]) / 3 >= goal:
            return i + 1, points[i].seconds
    return None


def run(args: argparse.Namespace) -> None:
    """Runs every setting with every seed, and writes `study.json` after each. A run that is there
    already is not done again."""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "sums.toml").write_text(RUN_FILE.format(model=args.model, device=args.device))
    settings = dict(setting.partition("=")[::2] for setting in args.setting)
    file = args.out / "study.json"
    found: dict[str, Any] = {"updates": args.updates, "runs": []}
    if file.is_file():
        found = json.loads(file.read_text())
    done = {(run["name"], run["seed"]) for run in found["runs"]}
    deadline = time.monotonic() + args.limit_s
    for seed in range(args.seeds):
        for name, overrides in settings.items():
            if (name, seed) in done:
                continue
            begin = time.monotonic()
            if begin > deadline:
                print("out of time")
                return
            if name.startswith("trl-"):
                precision = name.removeprefix("trl-")
                points = trl(args.model, args.device, precision, seed, args.updates)
            else:
                points = ludic(args.out, name, overrides.split(), seed, args.updates)
            found["runs"].append({"name": name, "seed": seed, "points": points})
            file.write_text(json.dumps(found))
            marks = {goal: reached(points, goal) for goal in GOALS}
            step = statistics.median(b.seconds - a.seconds for a, b in itertools.pairwise(points))
            print(f"{name} seed {seed}: {step:.3f} s an update, {marks}, ", end="")
            print(f"{time.monotonic() - begin:.0f} s in all", flush=True)


def page(args: argparse.Namespace) -> None:
    """Prints the table as Markdown, and writes the curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    study = json.loads((args.folder / "study.json").read_text())
    names = list(dict.fromkeys(run["name"] for run in study["runs"]))
    rows = ["| | s per update | first update | " + " | ".join(f"to {g}" for g in GOALS) + " |"]
    rows.append("|---" * (3 + len(GOALS)) + "|")
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for name in names:
        runs = [[Point(*p) for p in r["points"]] for r in study["runs"] if r["name"] == name]
        steps = [b.seconds - a.seconds for points in runs for a, b in itertools.pairwise(points)]
        first = statistics.median(points[0].seconds for points in runs)
        cells = [f"{statistics.median(steps):.2f}", f"{first:.1f} s"]
        for goal in GOALS:
            marks = [reached(points, goal) for points in runs]
            there = [mark for mark in marks if mark is not None]
            if len(there) <= len(marks) // 2:
                cells.append(f"{len(there)} of {len(marks)}")
                continue
            updates = statistics.median(mark[0] for mark in there)
            seconds = statistics.median(mark[1] for mark in there)
            cells.append(f"{updates:.0f} updates, {seconds:.1f} s")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
        for points in runs:
            smooth = [
                statistics.mean(p.reward for p in points[max(0, i - 2) : i + 1])
                for i in range(len(points))
            ]
            colour = f"C{names.index(name)}"
            label = name if points is runs[0] else None
            axes[0].plot(range(1, len(points) + 1), smooth, color=colour, label=label, alpha=0.8)
            axes[1].plot([p.seconds for p in points], smooth, color=colour, alpha=0.8)
    axes[0].set(xlabel="update", ylabel="mean reward, three updates")
    axes[1].set(xlabel="seconds, from the start of the first update")
    axes[0].legend(fontsize=8)
    args.target.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(args.target / "sums.png", dpi=120)
    print("\n".join(rows))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--model", required=True)
    runs.add_argument("--device", default="cuda")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--seeds", type=int, default=3)
    runs.add_argument("--updates", type=int, default=60)
    runs.add_argument("--limit-s", type=float, default=1e9, help="begin no run after this")
    runs.add_argument("setting", nargs="+", help="NAME=overrides, or trl-PRECISION")
    runs.set_defaults(do=run)
    pages = commands.add_parser("page")
    pages.add_argument("folder", type=Path)
    pages.add_argument("target", type=Path)
    pages.set_defaults(do=page)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
