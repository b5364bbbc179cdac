"""The commands. Each is a few lines; what it does is library code, imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="ludic",
    help="Train LLM agents with reinforcement learning. Add --debug to any command for tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Run = Annotated[str, typer.Argument(help="A run file (TOML), or the name of a built-in run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, as often as you like.")
]
Out = Annotated[Path | None, typer.Option(help="The run folder to make.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved run, and stop.")]


@app.command()
def train(
    run: Annotated[
        str | None, typer.Argument(help="A run file (TOML), or the name of a built-in run.")
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Train an agent: cold start if the run has one, reinforcement, evaluation."""
    from ludic.cli.train import train as start

    settings = list(overrides or [])
    if resume is not None and run is not None and "=" in run:
        settings.insert(0, run)
        run = None
    start(run, settings, out=out, resume=resume, dry_run=dry_run)


@app.command()
def sft(run: Run, overrides: Overrides = None, out: Out = None, dry_run: DryRun = False) -> None:
    """Only the supervised part of a run."""
    from ludic.cli.train import train as start

    settings = [*(overrides or []), "training.steps=0"]
    start(run, settings, out=out, resume=None, dry_run=dry_run, only_sft=True)


@app.command("eval")
def evaluate(
    run: Annotated[str | None, typer.Argument(help="A run folder, a run file or a name.")] = None,
    overrides: Overrides = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two reports, or run folders, to compare seed by seed."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")] = None,
    pass_at: Annotated[
        list[int] | None, typer.Option(min=1, help="Also pass@k, for this k; may be repeated.")
    ] = None,
) -> None:
    """Play held-out episodes and report rates with intervals, or compare two reports."""
    from ludic.cli.evaluate import compare as compare_reports
    from ludic.cli.evaluate import evaluate as start

    if compare is not None:
        compare_reports(*compare)
    else:
        start(run, overrides or [], output=output, pass_at=pass_at or [])


@app.command()
def play(
    env: Annotated[str, typer.Argument(help="An environment's name, or a run folder.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value, for the environment.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Watch the model of this run folder play.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The episode's seed.")] = 0,
) -> None:
    """Play an environment yourself, or watch a model play it."""
    from ludic.cli.play import play as start

    start(env, settings or [], model=model, seed=seed)


@app.command()
def generate(
    run: Annotated[str, typer.Argument(help="A run folder, a run file or a name.")],
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("rollouts.jsonl.gz"),
    episodes: Annotated[int, typer.Option(help="How many episodes to play.")] = 256,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="success, complete or parsed; may be repeated. All must hold."),
    ] = None,
) -> None:
    """Write rollouts, filtered by rejection, as data that `ludic sft` takes."""
    from ludic.cli.generate import generate as start

    start(run, overrides or [], output=output, episodes=episodes, keep=keep or [])


@app.command()
def replay(
    rollouts: Annotated[Path, typer.Argument(help="A file of rollouts.")],
    limit: Annotated[int, typer.Option(help="At most this many episodes.")] = 100,
    model: Annotated[
        Path | None,
        typer.Option(help="Also sample again with this run folder's model, token by token."),
    ] = None,
) -> None:
    """Run recorded episodes again and report the first divergence."""
    from ludic.cli.replay import replay as start

    start(rollouts, limit=limit, model=model)


@app.command()
def doctor(
    run: Annotated[str | None, typer.Argument(help="A run folder, a run file or a name.")] = None,
    overrides: Overrides = None,
) -> None:
    """Check the machine and, for a run, that sampler and trainer agree."""
    from ludic.cli.doctor import doctor as start

    start(run, overrides or [])


@app.command()
def calibrate(run: Run, overrides: Overrides = None) -> None:
    """Find the largest training.micro_token_budget that fits this machine."""
    from ludic.cli.calibrate import calibrate as start

    start(run, overrides or [])


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(context: typer.Context) -> None:
    """Serve a model with vLLM, ready for live weight updates (`ludic serve --help`)."""
    from ludic.inference.vllm.server import main

    raise SystemExit(main(context.args))


@app.command()
def envs() -> None:
    """List the environments that can be named."""
    from ludic.registry import list_envs

    _print_names(list_envs())


@app.command()
def algorithms() -> None:
    """List the algorithms that can be named."""
    from ludic.training.algorithms import list_algorithms

    _print_names(list_algorithms())


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="The new package's name, such as my_env.")],
) -> None:
    """Write a small package: an environment, its test, and a run file that trains at once."""
    from ludic.cli import scaffold

    print(scaffold.write(name, Path.cwd()))


def _print_names(names: dict[str, str]) -> None:
    width = max(map(len, names), default=0)
    for name, line in names.items():
        sys.stdout.write(f"{name:<{width}}  {line}\n")
