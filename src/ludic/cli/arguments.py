"""The arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUN_FILE = typer.Argument(help="A run file (TOML), or the name of a built-in run.")

RunFile = Annotated[str, RUN_FILE]
Run = Annotated[str, typer.Argument(help="A run folder, a run file or a name.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, as often as you like.")
]
Out = Annotated[Path | None, typer.Option(help="The run folder to make.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved run, and stop.")]
