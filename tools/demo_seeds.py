"""The demo over several run seeds: `python -m tools.demo_seeds` trains each and prints a table.

A seed whose folder has a summary already is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """The summary of one seed's run."""
    out = folder / str(seed)
    if not (out / "summary.json").is_file():
        command = [sys.executable, "-m", "ludic", "train", "tic-tac-toe", f"run.seed={seed}"]
        subprocess.run([*command, *overrides, "--out", str(out)], check=True)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


def shown(rate: dict[str, float]) -> str:
    return f"{rate['value']:.3f} ({rate['low']:.3f} to {rate['high']:.3f})"


def table(summaries: dict[int, dict[str, Any]]) -> str:
    """Markdown: a row per seed, and how many gained at least 0.15 with intervals apart."""
    rows = ["| seed | untrained | after SFT | after RL | gain |", "|---|---|---|---|---|"]
    gained = 0
    for seed, summary in summaries.items():
        before, sft, rl = (summary[f"win_{s}"] for s in ("before", "after_sft", "after_rl"))
        gain = rl["value"] - sft["value"]
        gained += gain >= 0.15 and rl["low"] > sft["high"]
        rows.append(
            f"| {seed} | {before['value']:.3f} | {shown(sft)} | {shown(rl)} | {gain:+.3f} |"
        )
    rows.append(f"\n{gained} of {len(summaries)} gained at least 0.15, with intervals apart.")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-seeds"))
    parser.add_argument("overrides", nargs="*", help="section.key=value, as for ludic train")
    args = parser.parse_args()
    seeds = range(args.seeds)
    print(table({seed: run(seed, args.folder, args.overrides) for seed in seeds}))


if __name__ == "__main__":
    main()
