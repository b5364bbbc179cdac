"""`ludic plan`: will it fit, how many GPUs, how long."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludic.cli.looking import ANY_RUN
from ludic.cli.training import Overrides
from ludic.errors import ConfigError, OutOfMemoryError

if TYPE_CHECKING:
    from ludic.plan.search import Option


class Goal(StrEnum):
    tokens_per_s = "tokens_per_s"
    updates = "updates"
    cost = "cost"


class Mode(StrEnum):
    sync = "sync"
    ahead = "ahead"
    asynchronous = "async"


def plan(
    run: Annotated[str, ANY_RUN],
    overrides: Overrides = None,
    gpus: Annotated[str, typer.Option(help="How many, as in 8,64,256,1024.")] = "1,8,64",
    gpu: Annotated[
        str, typer.Option(help="h200, h100, h800, h20, a100-80, or a profile's file.")
    ] = "h200",
    goal: Annotated[Goal, typer.Option(help="What the best is chosen by.")] = Goal.updates,
    mode: Annotated[Mode | None, typer.Option(help="Default: as the run file has it.")] = None,
    tokens: Annotated[
        float | None, typer.Option(min=1, help="Mean tokens of a completion.")
    ] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt.")] = None,
    env_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds of a step of the environment.")
    ] = None,
    host_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds that an environment computes per episode.")
    ] = None,
    earlier: Annotated[
        Path | None, typer.Option(help="A run folder whose rollouts give lengths and turns.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="A published model's sizes, as in Qwen2.5-7B.")
    ] = None,
    failures: Annotated[
        float, typer.Option(min=0, help="Failures of a GPU in a thousand hours.")
    ] = 0.0,
    explain: Annotated[bool, typer.Option("--explain", help="Where each figure is from.")] = False,
) -> None:
    """Foretell memory, time and cost of a run on so many GPUs, without starting anything."""
    from ludic.plan.report import chosen, cluster_lines, explained, table
    from ludic.plan.search import best
    from ludic.runs.planning import Given, job_of
    from ludic.runs.results.terminal import say

    numbers = _numbers(gpus)
    job, origins = job_of(
        run,
        overrides or [],
        Given(
            gpu=gpu,
            shape=shape,
            mode=None if mode is None else mode.value,
            tokens=tokens,
            env_s=env_s,
            host_s=host_s,
            prompt=prompt,
            earlier=earlier,
            failures_per_gpu_hour=failures / 1000,
        ),
    )
    options: dict[int, Option | str] = {}
    for number in numbers:
        try:
            options[number] = best(job, number)
        except OutOfMemoryError as exc:
            options[number] = str(exc)
    say(table(job, options))
    guesses = [f"{name} {text}" for name, text in origins.items() if "(assumed" in text]
    if guesses:
        say("not known, and most hangs on it: " + "; ".join(guesses))
    winner = chosen(job, options, goal.value)
    if explain:
        say("\n" + explained(job.costs.profile, origins))
    if winner is None:
        raise SystemExit(1)
    count = f"{winner.split.gpus} GPU" + "s" * (winner.split.gpus > 1)
    say(f"\nthe best by {goal.value}: {count}\n{cluster_lines(job, winner)}")


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > 65_536:
        raise ConfigError(f"--gpus {text}: whole numbers from 1 to 65536 with commas, as in 8,64")
    return numbers
