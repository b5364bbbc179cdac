"""`ludic.push`: a run's model on the hub, or the folder that would be uploaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ludic.runs.publishing.hub import Pushed, upload
from ludic.runs.publishing.package import packed


def push_run(
    run: str | Path,
    repo: str,
    *,
    revision: str = "main",
    private: bool = False,
    merged: bool = False,
    base_model: str | None = None,
) -> Pushed:
    """Publishes the model of a run folder (`FOLDER`, `FOLDER:sft`, `FOLDER:step-40`), or a folder
    that holds a model or an adapter, as `revision` of `repo` on the hub."""
    options: dict[str, Any] = {"merged": merged, "base_model": base_model}
    with packed(str(run), repo, revision=revision, **options) as package:
        message = f"Push of {Path(str(run)).name} by Ludic"
        return upload(package, repo, revision=revision, private=private, message=message)


def write_push(
    run: str | Path,
    repo: str,
    folder: str | Path,
    *,
    revision: str = "main",
    merged: bool = False,
    base_model: str | None = None,
) -> list[str]:
    """Writes what `push_run` would upload to a new folder, and returns the names of the files."""
    options: dict[str, Any] = {"merged": merged, "base_model": base_model}
    with packed(str(run), repo, revision=revision, **options) as package:
        package.write(Path(folder))
        return list(package.files)
