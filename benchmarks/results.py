"""A page of results from run folders: curve, tables, settings, command, versions and date.

    python -m benchmarks.results page RUN… --out docs/results/x.md --title "…" [--text notes.md]
    python -m benchmarks.results real FOLDER…    # all pages of `benchmarks.real_models`

Each RUN is a run folder, a folder of run folders, the `study.json` of `benchmarks.study`, or one of
them with a name before it: `LoRA=runs/lora-*`. Runs of one name are one line with its spread over
the seeds; without names, those whose settings differ in the seed alone. Run again with the same
folders it makes the same page: what stands above the mark in an earlier one is kept, unless
`--text` brings another text.

Of a run folder it reads `run.json` and `metrics.jsonl`, and where they are there `origin.json`
(command, versions, date, machine), `eval/*.json` (the evaluations) and `summary.json` (warnings).
So a folder that was fetched from another machine needs neither checkpoints nor rollouts.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real_pages import write_pages
from benchmarks.series import (
    METRIC,
    draw,
    grouped,
    how_it_was_run,
    read_all,
    runs_table,
    summary_table,
)
from ludic.runs.publishing.card import in_public

MARK = "<!-- Made by benchmarks.results: what follows is overwritten. -->"


def page(args: argparse.Namespace, made_by: str) -> None:
    """Writes the page and its picture."""
    parts = [f"# {args.title}", *_text(args), MARK]
    series = read_all(args.run, args.metric)
    groups = grouped(series)
    image = args.image or _image_for(args.out)
    draw(groups, image, args.metric, args.smooth)
    where = Path(os.path.relpath(image, args.out.parent)).as_posix()
    parts += [summary_table(groups, args.goal), f"![{args.title}]({where})"]
    if every := runs_table(series):
        parts += ["Held-out episodes of every run, with 95 % intervals:", every]
    parts += how_it_was_run(groups, made_by)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {args.out} and {image}")


def _text(args: argparse.Namespace) -> list[str]:
    """The page's words: those of a file, or those above the mark in the page as it is."""
    if args.text is not None:
        return [args.text.read_text(encoding="utf-8").strip()]
    if not args.out.exists():
        return []
    words, mark, _ = args.out.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise SystemExit(f"{args.out} has no mark that says what may be overwritten: give --text")
    return [kept] if (kept := words.strip().partition("\n")[2].strip()) else []


def _image_for(page: Path) -> Path:
    images = page.parent.parent / "images"
    folder = images if page.parent.name == "results" else page.parent
    return folder / f"{page.stem}.png"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    pages = commands.add_parser("page")
    pages.set_defaults(make=page)
    pages.add_argument("run", nargs="+", help="[NAME=]FOLDER, a study.json, or a pattern of them")
    pages.add_argument("--out", type=Path, required=True, help="the page to write")
    pages.add_argument("--title", required=True)
    pages.add_argument("--text", type=Path, help="Markdown that comes before the tables")
    pages.add_argument("--image", type=Path, help="by default docs/images/PAGE.png")
    pages.add_argument("--metric", default=METRIC)
    pages.add_argument("--smooth", type=int, default=8, help="updates in the curves' mean")
    pages.add_argument("--goal", type=float, action="append", default=[], help="when was it there?")
    real = commands.add_parser("real")
    real.set_defaults(make=_real)
    real.add_argument("folder", type=Path, nargs="+", help="what real_models.tar.gz held")
    real.add_argument("--root", type=Path, default=Path(), help="the repository")
    real.add_argument("--readme", action="store_true", help="also show three lines in the README")
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(words)
    args.make(args, shlex.join(["python", "-m", "benchmarks.results", *in_public(words)]))


def _real(args: argparse.Namespace, made_by: str) -> None:
    write_pages(args.folder, args.root, made_by, readme=args.readme)


if __name__ == "__main__":
    main()
