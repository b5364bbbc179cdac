"""`ludic push` and `init`: a model for the hub, a new environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ludic.errors import ConfigError


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
        raise ConfigError("--out is for --dry-run: a push leaves no folder")
    done = push_run(run, repo, private=private, **options)
    if done.changed:
        say(f"{done.url} is at commit {done.commit[:12]}")
    else:
        say(f"{done.url} has all of it already, at commit {done.commit[:12]}: nothing changed")


def init(
    name: Annotated[str, typer.Argument(help="The new package's name, such as my_env.")],
    kind: Annotated[
        str, typer.Option(help="The kind of environment: single, steps or two-seats.")
    ] = "single",
) -> None:
    """Write a small package: an environment, its test, and a run file that trains at once."""
    from ludic.runs import scaffold

    print(scaffold.write(name, Path.cwd(), kind))
