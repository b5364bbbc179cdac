"""Writes the tables of docs/scale.md and benchmarks/plan.md, and the picture of the former, for
`python -m benchmarks.plan --page`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludic.memory.plan import Engine, Plan
from ludic.memory.update import Training
from ludic.plan.costs import Costs
from ludic.plan.profile import load_profile, shape_named
from ludic.plan.report import gpu_hours
from ludic.plan.search import Job, Option, splits, try_split
from ludic.plan.workload import Lengths, Workload

ROOT = Path(__file__).resolve().parent.parent
EXPECTED, ACCURACY = ROOT / "docs" / "scale.md", ROOT / "benchmarks" / "plan.md"
PAGES = {"expected": EXPECTED, "fresh": ACCURACY, "fitted": ACCURACY}
PICTURE = ROOT / "docs" / "images" / "scale.png"
GPUS = (8, 64, 256, 1024)
MODELS = ("Qwen2.5-7B", "Qwen2.5-32B")
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"mode": "sync"},
    "asynchronous": {"mode": "async", "lag": 1, "in_order": False},
}
UPDATES = 100


def job(model: str, mode: str) -> Job:
    """512 prompts of 16 answers, 3,000 tokens on average and 16,384 at most, on H200s."""
    shape, most = shape_named(model), 16_384
    return Job(
        costs=Costs(load_profile("h200"), shape),
        workload=Workload(8192, 16, Lengths(3000, most, spread=0.8), UPDATES, prompt=200),
        memory=Plan(shape, Training(tokens=most, precision="bfloat16"), Engine(256, most + 1024)),
        longest=most + 1024,
        slots=256,
        context=most + 1024,
        **MODES[mode],
    )


def options() -> dict[tuple[str, str], dict[int, Option]]:
    found: dict[tuple[str, str], dict[int, Option]] = {}
    for model in MODELS:
        for mode in MODES:
            found[model, mode] = {gpus: quickest(job(model, mode), gpus) for gpus in GPUS}
    return found


def quickest(plan: Job, gpus: int) -> Option:
    """As `ludic.plan.search.best`, with every other split and fewer updates: these are large."""
    lag = 0 if plan.mode == "sync" else plan.lag
    tries = [try_split(plan, split, 1 + lag) for split in list(splits(plan, gpus))[::2]]
    return try_split(plan, min(tries, key=lambda o: o.result.update_s).split, 2 + lag)


def table(found: dict[tuple[str, str], dict[int, Option]]) -> str:
    lines = [
        "| | GPUs | trainer | servers | s an update | waiting | passes | publish | tokens/s | "
        f"GPU-hours for {UPDATES} updates | limited by |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, mode), sizes in found.items():
        for gpus, option in sizes.items():
            split, r = option.split, option.result
            lines.append(
                f"| {model}, {mode} | {gpus:,} | {split.ranks} | "
                f"{split.servers} x {split.gpus_per_server} | {r.update_s:.0f} | {r.wait_s:.0f} | "
                f"{r.train_s:.0f} | {r.publish_s:.1f} | {r.tokens_per_s:,.0f} | "
                f"{gpu_hours(option, UPDATES):,.0f} | {option.limit} |"
            )
    return "\n".join(lines)


def draw(found: dict[tuple[str, str], dict[int, Option]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, cost) = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for (model, mode), sizes in found.items():
        style = {
            "color": "tab:blue" if "7B" in model else "tab:orange",
            "linestyle": "--" if mode == "synchronous" else "-",
            "marker": "o",
            "label": f"{model}, {mode}",
        }
        speed.plot(list(sizes), [o.result.tokens_per_s for o in sizes.values()], **style)
        cost.plot(list(sizes), [gpu_hours(o, UPDATES) for o in sizes.values()], **style)
    for axes, title in ((speed, "tokens/s"), (cost, f"GPU-hours for {UPDATES} updates")):
        axes.set(xscale="log", yscale="log", xlabel="H200s", title=title)
        axes.set_xticks(GPUS, [f"{gpus:,}" for gpus in GPUS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    speed.legend(fontsize=8)
    figure.savefig(PICTURE, dpi=110)


def write_page(fitted: str) -> None:
    found = options()
    draw(found)
    write_tables({"expected": table(found), "fitted": fitted})


def write_tables(tables: Mapping[str, str]) -> None:
    """Puts each table between its marks."""
    for name, lines in tables.items():
        text = PAGES[name].read_text(encoding="utf-8")
        begin, end = f"<!-- {name}: made by benchmarks.plan -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n\n{lines}\n\n{end}{rest.partition(end)[2]}"
        PAGES[name].write_text(text, encoding="utf-8")
