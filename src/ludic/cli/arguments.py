"""The arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUN_FILE = typer.Argument(help="A run file (TOML), or the name of a built-in run.")

RunFile = Annotated[str, RUN_FILE]
ANY_RUN = typer.Argument(help="A run folder, a run file or a name.")
AnyRun = Annotated[str, ANY_RUN]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value; may be repeated.")]
Out = Annotated[Path | None, typer.Option(help="The run folder to create.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved run, and stop.")]
RedisUrl = Annotated[str | None, typer.Option(help="The URL of Redis; default: LUDIC_REDIS_URL.")]
