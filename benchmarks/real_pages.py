"""The pages of what `benchmarks.real_models` brought back: one for each question, an index, and
three lines for the README."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.real_runs import NO_RATE, OTHER_RATE, RATE, RATE_UPDATES
from benchmarks.series import (
    METRIC,
    Series,
    draw,
    figure_cell,
    grouped,
    how_it_was_run,
    read_run,
    read_study,
    reports_of,
    runs_table,
    summary_table,
    table,
)
from ludic.eval import EvalReport, headline_of
from ludic.runs.publishing.card import in_public

_Groups = Mapping[str, Sequence[Series]]
MARK = "<!-- Made by `benchmarks.results real`: what follows is overwritten. -->"
BEGIN, END = "<!-- Made by `benchmarks.results real --readme`. -->", "<!-- Until here. -->"
TASK = """\
A question of GSM8K, an answer of at most 512 tokens, and a reward of 1 for the right number in
`\\boxed{…}`, 0 for a wrong one and -0.1 for none: the README's `gsm8k.toml`. An update has 128
answers, in groups of 8 if the algorithm compares them. Samples are drawn at temperature 1, also in
evaluations. The models are Qwen2.5-Coder-Instruct, read from the published 4-bit files and trained
in bfloat16 with float32 masters.
"""
GSM8K = """
The 1.5B, with all weights at a learning rate of 1e-6 and with LoRA of rank 16 at 2e-5, compared
with TRL's `GRPOTrainer` with vLLM in its process, on the same reward and batch. Evaluated on all
1,319 test questions.
"""
ALGORITHMS = f"""
The 0.5B with every algorithm: equal batches, the same 400 draws from the test questions as
evaluation, and a learning rate of {RATE} for all; {OTHER_RATE} was tried for {RATE_UPDATES}
updates with each. With one seed, a difference of a few points may be chance: look at the
intervals. SPO's baseline is a question's earlier reward, so it sees only the first 512 questions,
each about ten times.
"""
DISTILLATION = """
The teacher is the 1.5B after its [GSM8K](gsm8k.md) run, the student the 0.5B. OPD trains the
student on its own answers towards the teacher's log-probs, without a reward. SFT trains it on as
many answers written by the teacher (cut ones left out), each once. GRPO trains it on as many
answers of its own, with the reward and without a teacher. MOPD has two teachers, the 1.5B for
GSM8K and a 0.5B that learned sums of four numbers, and one student for both tasks.
"""
SYNC_ASYNC = """
The 0.5B with GRPO: one process that samples and then trains, one that samples the next batch
while it trains (`training.overlap`), and an actor and a trainer over Redis
([`--async`](../pipeline.md)). In the last two, samples are one update old.
"""
MODELS = {
    "qwen05": "Qwen2.5-Coder-0.5B-Instruct",
    **dict.fromkeys(("qwen15", "model"), "Qwen2.5-Coder-1.5B-Instruct"),  # the latter by TRL
}
"""What the models in folders of such names are."""
PAGES = {
    "gsm8k": ("GSM8K", TASK + GSM8K),
    "algorithms": ("Every algorithm", TASK + ALGORITHMS),
    "distillation": ("Distillation", TASK + DISTILLATION),
    "sync_async": ("Synchronous and asynchronous", TASK + SYNC_ASYNC),
}


@dataclass(frozen=True)
class Book:
    """What a driver brought back: the runs of each page by label, and how each ended."""

    series: Mapping[str, Sequence[Series]]
    entries: Mapping[str, Mapping[str, Any]]
    notes: Sequence[str]

    def lost(self, page: str) -> list[str]:
        """A line for each run of the page that was cut, stopped, or failed."""
        lines = []
        for name, entry in self.entries.items():
            if page in entry["pages"] and entry["state"] != "done":
                why = str(in_public(entry.get("why", ""))).strip().splitlines() or ["no reason"]
                called = f"{entry['pages'][page]}, seed {entry['seed']}"
                lines.append(f"- `{name}` ({called}), {entry['state']}: {why[-1]}")
        return lines


def read_book(folders: Sequence[Path]) -> Book:
    """Reads the unpacked archives; where two have a run, that which was done counts."""
    entries: dict[str, dict[str, Any]] = {}
    places: dict[str, Path] = {}
    notes: dict[str, None] = {}
    for folder in folders:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        notes |= dict.fromkeys(plan.get("notes", ()))
        for name, entry in plan["runs"].items():
            if name not in entries or entries[name]["state"] != "done":
                entries[name], places[name] = entry, folder / name
    series: dict[str, list[Series]] = {page: [] for page in PAGES}
    for name, entry in entries.items():
        for page, label in entry["pages"].items():
            run = _read(places[name], label, alone=entry.get("beside", 0) == 0)
            if run is not None:
                series[page].append(run)
    return Book(series, entries, list(notes))


def _read(path: Path, label: str, *, alone: bool) -> Series | None:
    """A run with anything to show; None of one that has nothing."""
    if (path / "trl.json").is_file():
        (run,) = read_study(path / "trl.json")
        return replace(run, name=label, alone=alone) if run.points else None
    if not (path / "run.json").is_file():
        return None
    run = replace(read_run(path, label, curve=False), alone=alone)
    if run.facts is None or not (run.points or run.facts.reports):
        return None
    if run.facts.settings["training"].get("learning_rate") == NO_RATE:
        reports = {"after_rl": run.facts.reports["before"]}  # weights that another one trained
        return replace(run, points=[], facts=replace(run.facts, reports=reports))
    return run


def write_pages(folders: Sequence[Path], root: Path, made_by: str, *, readme: bool) -> None:
    """Writes the pages that there are runs for, the index, and the README's lines if asked."""
    book = read_book(folders)
    results = root / "docs" / "results"
    results.mkdir(parents=True, exist_ok=True)
    written = []
    for page in PAGES:
        if any(run.points or run.facts for run in book.series[page]):
            _write_page(page, book, root, made_by)
            written.append(page)
        else:
            print(f"nothing for {page}: " + "; ".join(book.lost(page)))
    _write_index(book, written, root, made_by)
    _add_to_nav(root / "mkdocs.yml", ["index", *written])
    if readme:
        _write_readme(book, root)


def _write_page(page: str, book: Book, root: Path, made_by: str) -> None:
    title, words = PAGES[page]
    target = root / "docs" / "results" / f"{page}.md"
    image = root / "docs" / "images" / f"{page}.png"
    earlier = target.read_text(encoding="utf-8") if target.exists() else ""
    if MARK in earlier:  # somebody may have said more
        words = earlier.partition(MARK)[0].strip().partition("\n")[2].strip()
    groups, tried = _apart(grouped(book.series[page]))
    draw({name: [r for r in runs if r.points] for name, runs in groups.items()}, image, METRIC, 8)
    where = Path(os.path.relpath(image, target.parent)).as_posix()
    parts = [f"# {title}", words.strip(), MARK, _company(groups), *book.notes]
    parts += [summary_table(groups, ()), f"![{title}]({where})"]
    if every := runs_table(book.series[page]):
        parts += ["Held-out episodes of every run, with 95 % intervals:", every]
    if tried:
        parts += [
            f"The first {RATE_UPDATES} updates at another learning rate:",
            _rates(groups, tried),
        ]
    if page == "distillation":
        parts += ["Tokens that each run sampled and trained on:", _tokens(groups)]
    if lost := book.lost(page):
        parts += ["## Cut, stopped and failed", "\n".join(lost)]
    parts += how_it_was_run(grouped(book.series[page]), made_by, settings_of=1)
    target.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    print(f"wrote {target} and {image}")


def _apart(groups: dict[str, list[Series]]) -> tuple[_Groups, _Groups]:
    """The runs to compare, and by the same names those that only try another learning rate."""
    other = f" at {OTHER_RATE}"
    tried = {name.removesuffix(other): r for name, r in groups.items() if name.endswith(other)}
    return {name: r for name, r in groups.items() if not name.endswith(other)}, tried


def _rates(groups: _Groups, tried: _Groups) -> str:
    """The reward of the second half of a trial, beside the same updates of the first long run."""
    half = slice(RATE_UPDATES // 2, RATE_UPDATES)
    where = f"reward, updates {half.start + 1} to {half.stop}"
    rows = [["", f"{where}, {RATE}", f"{where}, {OTHER_RATE}", f"right after them, {OTHER_RATE}"]]
    for name, (run, *_) in tried.items():
        means = [fmean(p.reward for p in each.points[half]) for each in (groups[name][0], run)]
        right = _rate(reports_of([run], "after_rl"))
        rows.append([name, *(f"{mean:.3f}" for mean in means), right])
    return table(rows)


def _company(groups: Mapping[str, Sequence[Series]]) -> str:
    """Says which seconds mean something."""
    runs = list(itertools.chain.from_iterable(groups.values()))
    alone = [f"{run.name} (seed {run.seed})" for run in runs if run.alone]
    if len(alone) == len(runs):
        return "Every run had the GPU to itself."
    if not alone:
        return "The runs shared one GPU, so their seconds say nothing about speed."
    return (
        f"Alone on the GPU: {', '.join(alone)}. The other runs shared it, so their seconds say "
        "nothing about speed, and they are not among the curves over seconds."
    )


def _tokens(groups: Mapping[str, Sequence[Series]]) -> str:
    rows = [["", "seed", "tokens of its own answers"]]
    for run in itertools.chain.from_iterable(groups.values()):
        count = run.facts.figures.get("completion tokens") if run.facts else None
        rows.append([run.name, str(run.seed), f"{count:,.0f}" if count else "–"])
    return table(rows)


def _rate(reports: Sequence[EvalReport]) -> str:
    return figure_cell(reports, headline_of(reports))


def _row(page: str, name: str, runs: Sequence[Series], peer: str) -> list[str]:
    folders = {Path(str(r.facts.settings["model"]["name"])).name for r in runs if r.facts}
    models = [MODELS.get(folder, folder) for folder in folders]
    timed = [r.points[-1].seconds / 60 for r in runs if r.points and r.alone]
    minutes = f"{sum(timed) / len(timed):.1f}" if timed else "–"
    updates = dict.fromkeys(str(len(r.points)) for r in runs if r.points)
    return [
        f"[{PAGES[page][0]}]({page}.md): {name}",
        ", ".join(sorted(models)) or "–",
        str(len(runs)),
        _rate(reports_of(runs, "before")),
        _rate(reports_of(runs, "after_sft", "after_rl")),
        ", ".join(updates) or "–",
        minutes,
        peer,
    ]


HEADER = ["task", "model", "seeds", "before", "after", "updates", "minutes", "peer"]


def _rows(book: Book, pages: Sequence[str]) -> list[list[str]]:
    rows = []
    for page in pages:
        groups, _ = _apart(grouped(book.series[page]))
        peers = [runs for name, runs in groups.items() if name.startswith("TRL")]
        for name, runs in groups.items():
            ours = page == "gsm8k" and not name.startswith("TRL")
            rows.append(_row(page, name, runs, _peer(peers) if ours else ""))
    return rows


def _peer(groups: Sequence[Sequence[Series]]) -> str:
    """What TRL did in the same run, as far as it is known."""
    runs = [run for group in groups for run in group]
    timed = [run for run in runs if run.points and run.alone]
    after = reports_of(runs, "after_rl")
    said = [f"TRL {_rate(after)}"] if after else []
    said += [f"{len(r.points)} updates in {r.points[-1].seconds / 60:.1f} min" for r in timed]
    return ", ".join(said)


def _write_index(book: Book, written: Sequence[str], root: Path, made_by: str) -> None:
    others = sorted({"sums", "tic_tac_toe", "tool_use"} - set(written))
    parts = [
        "# Results",
        "What models learned in published runs: right answers on held-out questions, before and "
        "after training, with 95 % intervals; for several seeds, the mean and the range. Minutes "
        "count the updates only, of runs that had the GPU to themselves. Each page has curves, "
        "settings, commands and what did not work.",
        MARK,
        table([HEADER, *_rows(book, written)]),
    ]
    commands = dict.fromkeys(
        f"{in_public(entry['command'])}"
        for entry in book.entries.values()
        if entry["state"] in ("done", "stopped") and "command" in entry
    )
    parts += ["The command of each run:", "```bash\n" + "\n".join(commands) + "\n```"]
    lost = list(dict.fromkeys(line for page in PAGES for line in book.lost(page)))
    if lost:
        parts += ["## Cut, stopped and failed", "\n".join(lost)]
    pages = ", ".join(f"[{name.replace('_', ' ')}]({name}.md)" for name in others)
    parts += [f"With smaller models: {pages}.", f"```bash\n{made_by}\n```"]
    target = root / "docs" / "results" / "index.md"
    target.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {target}")


def _add_to_nav(file: Path, pages: Sequence[str]) -> None:
    """Lists pages among the results that are not listed yet."""
    text = file.read_text(encoding="utf-8")
    heading = "  - Results:\n"
    for page in reversed([p for p in pages if f"results/{p}.md" not in text]):
        text = text.replace(heading, f"{heading}      - results/{page}.md\n", 1)
    file.write_text(text, encoding="utf-8")


def _write_readme(book: Book, root: Path) -> None:
    """Shows three lines and the curve of GSM8K in the README, above Tic-Tac-Toe."""
    file = root / "README.md"
    text = file.read_text(encoding="utf-8")
    rows = _rows(book, [page for page in PAGES if book.series[page]])
    wanted = (
        "GSM8K](gsm8k.md): Ludic, all weights",
        "algorithms.md): GRPO",
        "distillation.md): OPD",
    )
    shown = [row for want in wanted for row in rows if row[0].endswith(want)][:3]
    if not shown:
        raise SystemExit("none of the three lines for the README has a run: it stays as it is")
    lines = table([HEADER, *shown]).replace("](", "](docs/results/")
    block = "\n\n".join(
        [
            BEGIN,
            "Pretrained models trained on one H200 ([all results](docs/results/index.md)):",
            lines,
            "![GSM8K over updates and seconds](docs/images/gsm8k.png)",
            END,
        ]
    )
    if BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        text = before + block + rest.partition(END)[2]
    else:
        first = re.search(r"^```bash\nmake test", text, re.MULTILINE)
        if first is None:
            raise SystemExit(f"{file} has no `make test` that the results could stand above")
        text = text[: first.start()] + block + "\n\n" + text[first.start() :]
    file.write_text(text, encoding="utf-8")
    print(f"wrote {file}")
