"""`ludic view`: runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders that hold runs.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
) -> None:
    """Look at runs in a browser: curves, rollouts token by token, groups, evaluations."""
    from ludic.view import view as show

    show(folders or [], host=host, port=port, open_browser=open_browser, say=typer.echo)
