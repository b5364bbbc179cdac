"""Trains `tiny.toml` with one seed and one choice of credit, and writes what came of it as JSON.

python examples/compaction/train.py --seed 0 --credit advantage --out runs/remember-0.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ludic.runs.run import Run

HERE = Path(__file__).resolve().parent


def train(seed: int, credit: str, folder: Path, settings: list[str]) -> dict[str, Any]:
    """One run: the share of right answers before and after, and in every update."""
    began = time.monotonic()
    run = Run.from_file(
        str(HERE / "tiny.toml"),
        [
            f"run.seed={seed}",
            f'algorithm.summaries="{credit}"',
            f"logging.loggers={json.dumps([])}",
            *settings,
        ],
        out=folder,
    ).go()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [line["train/reward_mean"] for line in lines if "train/reward_mean" in line]
    reports = {path.stem: json.loads(path.read_text()) for path in (folder / "eval").glob("*.json")}
    right = {
        name: sum(e["outcome"] == "right" for e in report["episodes"]) / len(report["episodes"])
        for name, report in reports.items()
    }
    fewest = min(e["compactions"] for report in reports.values() for e in report["episodes"])
    return {
        "seed": seed,
        "credit": credit,
        "updates": run.trainer.step,
        "right": right,
        "curve": curve,
        "fewest_compactions": fewest,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--credit", choices=["advantage", "none"], default="advantage")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("settings", nargs="*", help="of the run file, such as training.steps=10")
    given = parser.parse_args()
    result = train(given.seed, given.credit, given.out.with_suffix(""), given.settings)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "curve"}))


if __name__ == "__main__":
    main()
