"""Draws the curves of what `train.py` wrote, and prints the table.

python examples/compaction/plot.py runs/remember/*.json --out docs/images/compaction.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

COLOURS = {"advantage": "tab:blue", "none": "tab:orange"}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    results = [json.loads(path.read_text()) for path in given.results]
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    print("| credit of the summary | seed | after the cold start | after the reinforcement |")
    print("|---|---|---|---|")
    for result in sorted(results, key=lambda r: (r["credit"], r["seed"])):
        credit, curve, right = result["credit"], result["curve"], result["right"]
        means = [sum(curve[max(i - 4, 0) : i + 1]) / len(curve[max(i - 4, 0) : i + 1])
                 for i in range(len(curve))]  # fmt: skip
        label = f"summaries = {credit}" if result["seed"] == 0 else None
        axes.plot(range(1, len(means) + 1), means, color=COLOURS[credit], label=label)
        print(
            f"| {credit} | {result['seed']} | {right['after_sft']:.0%} | {right['after_rl']:.0%} |"
        )
    axes.axhline(0.25, color="grey", linestyle=":", label="chance")
    axes.set(xlabel="update", ylabel="right answers, mean of five updates", ylim=(0, 1))
    axes.legend()
    figure.savefig(given.out, dpi=150)


if __name__ == "__main__":
    main()
