"""The `ludic` program: its commands, in the order that `--help` lists them. What they do is library
code, in `runs`, which each imports when it is called."""

from __future__ import annotations

from collections.abc import Callable

import typer

from ludic.cli import episodes, looking, sampling, training

app = typer.Typer(
    name="ludic",
    help="Train LLM agents with reinforcement learning. Add --debug to any command for tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(sampling.pipeline, name="pipeline")


def _add(*commands: Callable[..., None]) -> None:
    for command in commands:
        app.command()(command)


_add(training.train, training.sft, sampling.launch, sampling.actor)
app.command("eval")(episodes.evaluate)
_add(episodes.play, episodes.generate, episodes.replay)
_add(looking.doctor, looking.plan, looking.calibrate)
app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(sampling.serve)
_add(looking.envs, looking.algorithms, looking.init, looking.view, looking.push)
