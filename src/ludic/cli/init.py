"""`ludic init`: a package with an environment, its test, and a run file that trains at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    name: Annotated[str, typer.Argument(help="The new package's name, such as my_env.")],
    kind: Annotated[
        str, typer.Option(help="What the environment is like: single, steps or two-seats.")
    ] = "single",
) -> None:
    """Write a small package: an environment, its test, and a run file that trains at once."""
    from ludic.runs import scaffold

    print(scaffold.write(name, Path.cwd(), kind))
