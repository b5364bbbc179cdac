"""The `ludic` program: its commands, in the order that `--help` lists them. What they do is library
code, in `runs`, which each imports when it is called."""

from __future__ import annotations

import typer

from ludic.cli import episodes, looking, sampling, training

app = typer.Typer(
    name="ludic",
    help="Train LLM agents with reinforcement learning. Add --debug to any command for tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(training.train)
app.command()(training.sft)
app.command()(sampling.launch)
app.command()(sampling.actor)
app.add_typer(sampling.pipeline, name="pipeline")
app.command("eval")(episodes.evaluate)
app.command()(episodes.play)
app.command()(episodes.generate)
app.command()(episodes.replay)
app.command()(looking.doctor)
app.command()(looking.plan)
app.command()(looking.calibrate)
app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(sampling.serve)
app.command()(looking.envs)
app.command()(looking.algorithms)
app.command()(looking.init)
app.command()(looking.view)
app.command()(looking.push)
