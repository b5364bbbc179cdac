"""How well `ludic plan` predicts what was measured: `python -m benchmarks.plan`.

The profile of the H200 is fitted on what we measured up to a day (`benchmarks.plan_rows`) and is
judged by runs made after it was fixed. Published rows of other systems are judged by their ratio of
asynchronous to synchronous.

    python -m benchmarks.plan                  # the rows that fit it, and other systems
    python -m benchmarks.plan --write          # fits the H200's profile again
    python -m benchmarks.plan --page           # also writes docs/scale.md's and plan.md's tables
    python -m benchmarks.plan --judge FOLDER   # run folders and benchmarks' output in a folder
    python -m benchmarks.plan --judge FOLDER --page

The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.plan_others import areal_lines, nemo_lines, verl_lines
from benchmarks.plan_own import Line, fitted, own_lines, table
from ludic.plan.profile import load_profile

ROOT = Path(__file__).resolve().parent.parent
PROFILE = ROOT / "src" / "ludic" / "plan" / "profiles" / "h200.json"
WITHIN = 0.15


# Reading a batch


def intake() -> dict[str, float]:
    """Processor time of the trainer's side of Redis: messages to a batch, by episode and token."""
    import asyncio
    import time

    import msgspec

    from benchmarks import pipeline
    from ludic.pipeline.messages import Group, group_message, read_group
    from ludic.saw.building import batch_from_rollouts
    from ludic.training.algorithms.grpo import make_grpo

    request = msgspec.structs.replace(pipeline.REQUEST, num_episodes=pipeline.GROUP)
    credit, lines = make_grpo(group_size=pipeline.GROUP).credit_assigner, []
    for pipeline.TOKENS in (256, 1024):
        engine, _ = pipeline.make_engine()
        groups = [asyncio.run(engine.generate_rollouts([request])) for _ in range(8)]
        messages = [
            group_message(Group(i, tuple(r.labelled(group_id=str(i)) for r in group)))
            for i, group in enumerate(groups)
        ]
        times = []
        for _ in range(10):
            begin = time.process_time()
            rollouts = [r for message in messages for r in read_group(message).rollouts]
            batch_from_rollouts(rollouts, credit)
            times.append((time.process_time() - begin) / len(rollouts))
        lines.append((pipeline.TOKENS, min(times)))
    (few, low), (many, high) = lines
    token_s = (high - low) / (many - few)
    return {"intake_token_s": token_s, "intake_episode_s": low - few * token_s}


# What is printed


def figures(lines: Sequence[Line], use: str) -> dict[str, Any]:
    """How many of the lines of a use are within 15 %, and the ratios of other systems."""
    ours = [line for line in lines if line.use == use and line.group != "async : sync"]
    ratios = [line for line in lines if line.group == "async : sync"]
    found: dict[str, Any] = {use: len(ours)}
    if ours:
        found |= {
            "within_15_percent": sum(abs(line.error) <= WITHIN for line in ours),
            "mean_error": round(fmean(abs(line.error) for line in ours), 4),
            "worst": round(max(ours, key=lambda line: abs(line.error)).error, 4),
        }
    if ratios:
        found["ratios"] = {
            line.name: [round(line.predicted, 3), round(line.measured, 3)] for line in ratios
        }
    return found


def judge(folder: Path, *, page: bool) -> None:
    """Prints what a folder's runs took beside what the fixed profile predicts."""
    from benchmarks.plan_judge import judged_lines
    from benchmarks.plan_page import write_tables

    if not folder.is_dir():
        raise SystemExit(f"there is no folder {folder}: name one with run folders or their logs")
    lines, left_out = judged_lines(folder, load_profile("h200"))
    digest = hashlib.sha256(PROFILE.read_bytes()).hexdigest()[:12]
    found = figures(lines, "judged")
    text = [table(lines), "", f"Profile {digest}."]
    if lines:
        text[-1] += (
            f" {found['within_15_percent']} of {found['judged']} figures within 15 %; "
            f"{found['mean_error']:.0%} on average."
        )
    text += [f"Left out: {reason}" for reason in left_out]
    print("\n".join(text))
    if page:
        write_tables({"fresh": "\n".join(text)})
    print(json.dumps(found | {"profile": digest, "left_out": len(left_out)}))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="fit and write the H200's profile")
    parser.add_argument("--intake", action="store_true", help="measure reading a batch, and stop")
    parser.add_argument("--page", action="store_true", help="write the tables and the picture")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="judge by the runs in it")
    args = parser.parse_args(words)
    if args.intake:
        print(json.dumps(intake()))
        return
    if args.judge is not None:
        judge(args.judge, page=args.page)
        return
    profile = load_profile("h200")
    if args.write:
        profile = fitted(profile)
        profile.write(PROFILE)
    lines = [*own_lines(profile), *verl_lines(), *areal_lines(), *nemo_lines()]
    print(table(lines))
    if args.page:
        from benchmarks.plan_page import write_page

        write_page(table(lines))
    print(json.dumps(figures(lines, "fitted")))


if __name__ == "__main__":
    main()
