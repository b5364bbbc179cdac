"""The rollouts of a run on disk, without those of steps that a resumed run repeats."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ludic.plumbing.files import replacing
from ludic.rollouts import RolloutWriter
from ludic.rollouts.lines import CutFileWarning, keep_lines
from ludic.runs.storage.folder import RunFolder


def rollout_file(folder: Path, name: str) -> Path:
    """Where a run keeps rollouts: `name`.jsonl.zst, or the .jsonl.gz of a run that began with an
    earlier version."""
    before = folder / f"{name}.jsonl.gz"
    return before if before.is_file() else folder / f"{name}.jsonl.zst"


def token_file(folder: Path) -> Path:
    """Where a run keeps what its trainer made of the tokens of its rollouts."""
    return folder / "train.tokens.jsonl.zst"


def keep_tokenizer(folder: RunFolder, tokenizer: Any) -> None:
    """Saves what the tokens' text is read from, once, beside the rollouts."""
    target = folder.rollouts / "tokenizer.json"
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not target.exists():
        with replacing(target) as temporary:
            temporary.write_text(backend.to_str(), encoding="utf-8")


def open_rollout_log(
    path: Path, step: int, is_settled: Callable[[int], bool] = bool
) -> RolloutWriter:
    """Returns a writer that appends to the episodes of the steps before `step`, or of the units of
    a run over Redis that are settled."""
    with warnings.catch_warnings():
        # A kill may leave half a line, and what it was of is sampled again.
        warnings.simplefilter("ignore", CutFileWarning)
        if path.exists():
            keep_lines(path, lambda row: _is_kept(row["episode_id"], step, is_settled))
        return RolloutWriter(path, append=True)


def _is_kept(episode_id: str, step: int, is_settled: Callable[[int], bool]) -> bool:
    """Episodes are named step-N/… or step-N-round-M/…, and those of actors unit-N/…"""
    if match := re.match(r"unit-(\d+)/", episode_id):
        return is_settled(int(match[1]))
    match = re.match(r"step-(\d+)", episode_id)
    return match is None or int(match[1]) < step
