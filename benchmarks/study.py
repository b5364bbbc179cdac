"""How soon a reward comes: SmolLM2 learns sums by `ludic train`, in every precision, beside TRL.

    python -m benchmarks.study --model PATH --out FOLDER NAME=overrides …     # on a GPU
    python -m benchmarks.results page FOLDER/study.json …    # tables and curves from it

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
from typing import Any

from benchmarks.series import Point, reached, read_points, read_trl

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


def ludic(work: Path, name: str, overrides: Sequence[str], seed: int, updates: int) -> list[Point]:
    """One run of the command; returns its updates."""
    folder = work / f"ludic-{name}-{seed}"
    command = [sys.executable, "-m", "ludic", "train", str(work / "sums.toml")]
    command += ["--out", str(folder), f"run.seed={seed}", f"training.steps={updates}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}")
    return read_points(folder / "metrics.jsonl")


def trl(model: str, device: str, precision: str, seed: int, updates: int) -> list[Point]:
    """The same by TRL."""
    command = [sys.executable, "-m", "benchmarks.trl_loop", "--model", model, "--device", device]
    command += ["--precision", precision, "--seed", str(seed), "--updates", str(updates)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}")
    return read_trl(done.stdout)


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
    for seed in range(args.first_seed, args.first_seed + args.seeds):
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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no run after this")
    parser.add_argument("setting", nargs="+", help="NAME=overrides, or trl-PRECISION")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
