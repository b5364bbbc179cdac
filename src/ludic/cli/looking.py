"""`ludic doctor`, `calibrate`, `plan`, `envs`, `algorithms` and `view`: what is there, how it is,
and how long it would take; `push` and `init`: a model for the hub, a new environment."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ludic.cli.training import Overrides, RunFile
from ludic.errors import ConfigError, OutOfMemoryError

if TYPE_CHECKING:
    from ludic.plan.search import Option

ANY_RUN = typer.Argument(help="A run folder, a run file or a name.")
AnyRun = Annotated[str, ANY_RUN]


def doctor(run: Annotated[str | None, ANY_RUN] = None, overrides: Overrides = None) -> None:
    """Check the machine and, for a run, that sampler and trainer agree."""
    from rich.table import Table

    from ludic.runs.doctor import examine_run
    from ludic.runs.machine import check_machine
    from ludic.runs.results.terminal import console, say

    table = Table(box=None, pad_edge=False, show_header=False)
    for fact in check_machine():
        table.add_row(fact.name, fact.found, fact.remedy or "")
    console.print(table)
    if run is None:
        return
    report = asyncio.run(examine_run(run, overrides or []))
    say(f"\nlog-probs, trainer against sampler:\n\n{report.table()}")
    over = sum(not row.ok for row in report.rows)
    if over:
        say(f"\n{over} over the budget: this sampler is not the policy that would be trained")
        raise SystemExit(1)
    say("\nall is well")


def calibrate(
    run: RunFile,
    overrides: Overrides = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Write this machine's profile for `ludic plan` instead; no GPU needed."),
    ] = None,
) -> None:
    """Find the largest training.micro_token_budget that fits this machine."""
    from ludic.runs.memory import calibrate_run
    from ludic.runs.results.terminal import say

    if profile is not None:
        from ludic.runs.planning import measure_profile

        measure_profile(run, overrides or []).write(profile)
        say(f"{profile}: use it with `ludic plan RUN --gpu {profile}`")
        return
    (fit, share), gib = calibrate_run(run, overrides or []), 2**30
    sampling = f", and sampling takes {fit.reserved_bytes / gib:.1f}" if fit.reserved_bytes else ""
    say(
        f"training.micro_token_budget={fit.micro_token_budget}"
        + (f" inference.vllm.gpu_memory={share}" if share is not None else "")
        + f": the peak is {fit.peak_bytes / gib:.1f} of {fit.total_bytes / gib:.1f} GiB"
        + sampling
    )


class Goal(StrEnum):
    tokens_per_s = "tokens_per_s"
    updates = "updates"
    cost = "cost"


class Mode(StrEnum):
    sync = "sync"
    ahead = "ahead"
    asynchronous = "async"


def plan(
    run: AnyRun,
    overrides: Overrides = None,
    gpus: Annotated[str, typer.Option(help="GPU counts, as in 8,64,256,1024.")] = "1,8,64",
    gpu: Annotated[
        str, typer.Option(help="h200, h100, h800, h20, a100-80, or a profile file.")
    ] = "h200",
    goal: Annotated[Goal, typer.Option(help="What to optimise for.")] = Goal.updates,
    mode: Annotated[Mode | None, typer.Option(help="Default: that of the run.")] = None,
    tokens: Annotated[
        float | None, typer.Option(min=1, help="Mean completion length, in tokens.")
    ] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Prompt length, in tokens.")] = None,
    env_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds per environment step.")
    ] = None,
    host_s: Annotated[
        float | None, typer.Option(min=0, help="CPU seconds of an environment per episode.")
    ] = None,
    earlier: Annotated[
        Path | None, typer.Option(help="A run folder to take lengths and turns from.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="A published model's sizes, as in Qwen2.5-7B.")
    ] = None,
    failures: Annotated[float, typer.Option(min=0, help="GPU failures per thousand hours.")] = 0.0,
    explain: Annotated[bool, typer.Option("--explain", help="Explain each figure.")] = False,
) -> None:
    """Predict memory, time and cost of a run on any number of GPUs, without starting anything."""
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
        say("these assumptions matter most: " + "; ".join(guesses))
    winner = chosen(job, options, goal.value)
    if explain:
        say("\n" + explained(job.costs.profile, origins))
    if winner is None:
        raise SystemExit(1)
    count = f"{winner.split.gpus} GPU" + "s" * (winner.split.gpus > 1)
    say(f"\nbest by {goal.value}: {count}\n{cluster_lines(job, winner)}")


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > 65_536:
        raise ConfigError(f"--gpus {text}: give numbers from 1 to 65536 with commas, as in 8,64")
    return numbers


def envs() -> None:
    """List the available environments."""
    from ludic.registry import list_envs
    from ludic.runs.results.terminal import print_names

    print_names(list_envs())


def algorithms() -> None:
    """List the available algorithms."""
    from ludic.registry import list_algorithms
    from ludic.runs.results.terminal import print_names

    print_names(list_algorithms())


def view(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders with runs in them.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
) -> None:
    """Look at runs in a browser: curves, rollouts token by token, groups, evaluations."""
    from ludic.view import view as show

    show(folders or [], host=host, port=port, open_browser=open_browser, say=typer.echo)


def push(
    run: Annotated[
        str,
        typer.Argument(
            help="A run folder, FOLDER:sft, FOLDER:step-40, or a folder with a model or an adapter."
        ),
    ],
    repo: Annotated[str, typer.Argument(help="Where it goes: OWNER/NAME.")],
    revision: Annotated[str, typer.Option(help="The target branch.")] = "main",
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="Push the full model, with its adapter merged in.")
    ] = False,
    base_model: Annotated[
        str | None, typer.Option(help="The adapter's base model, by its name on the hub.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder that would be uploaded, and stop.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --dry-run, the folder to write; default: push-NAME.")
    ] = None,
) -> None:
    """Publish a run's checkpoint or adapter on the Hugging Face hub, with a card of the run."""
    from ludic.runs.publishing.push import push_run, write_push
    from ludic.runs.results.terminal import say

    options: dict[str, Any] = {"revision": revision, "merged": merged, "base_model": base_model}
    if dry_run:
        where = out or Path(f"push-{repo.rpartition('/')[2]}")
        names = write_push(run, repo, where, **options)
        say(f"wrote {where}/ ({', '.join(names)}); nothing was uploaded")
        return
    if out is not None:
        raise ConfigError("--out goes with --dry-run: a push writes no folder")
    done = push_run(run, repo, private=private, **options)
    if done.changed:
        say(f"{done.url} is at commit {done.commit[:12]}")
    else:
        say(f"{done.url} is already up to date, at commit {done.commit[:12]}")


def init(
    name: Annotated[str, typer.Argument(help="The new package's name, such as my_env.")],
    kind: Annotated[
        str, typer.Option(help="The kind of environment: single, steps or two-seats.")
    ] = "single",
) -> None:
    """Write a small package: an environment, its test, and a run file that trains at once."""
    from ludic.runs import scaffold

    print(scaffold.write(name, Path.cwd(), kind))
