"""The `ludic` program: its commands, one file each. What they do is library code, in `runs`."""

from __future__ import annotations

import typer

from ludic.cli import (
    actor,
    algorithms,
    calibrate,
    doctor,
    envs,
    evaluate,
    generate,
    init,
    pipeline,
    play,
    push,
    replay,
    serve,
    sft,
    train,
    view,
)

app = typer.Typer(
    name="ludic",
    help="Train LLM agents with reinforcement learning. Add --debug to any command for tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train.train)
app.command()(sft.sft)
app.command()(actor.actor)
app.add_typer(pipeline.app, name="pipeline")
app.command("eval")(evaluate.evaluate)
app.command()(play.play)
app.command()(generate.generate)
app.command()(replay.replay)
app.command()(doctor.doctor)
app.command()(calibrate.calibrate)
app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(serve.serve)
app.command()(envs.envs)
app.command()(algorithms.algorithms)
app.command()(init.init)
app.command()(view.view)
app.command()(push.push)
