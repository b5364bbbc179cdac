"""`ludic train`: starts a run, or goes on with one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from ludic.errors import ConfigError
from ludic.runs.assemble import make_importable
from ludic.runs.check import check_parts
from ludic.runs.folder import RunFolder
from ludic.runs.locate import builtin_runs, find_run
from ludic.runs.settings import RunConfig, apply_override, check_run


def train(
    run: str | None,
    overrides: Sequence[str],
    *,
    out: Path | None,
    resume: Path | None,
    dry_run: bool,
    only_sft: bool = False,
) -> None:
    """Starts a run, or goes on with one. `only_sft`: the run must have a cold start."""
    if resume is not None:
        if run is not None or out is not None:
            raise ConfigError("--resume takes the run from its folder: give no run file or --out")
        folder = RunFolder.open(resume)
        config = _resumed(folder, overrides)
        beside = Path(folder.read_json("origin.json").get("run_file_folder") or ".")
    else:
        if run is None:
            raise ConfigError(f"name a run file, or one of the built-in runs: {builtin_runs()}")
        config, beside = find_run(run, overrides)
        config = _with_whole_path(config)
    if only_sft and config.sft is None:
        raise ConfigError(f"{run} has no cold start: add an [sft] table with a teacher or data")
    make_importable(beside)
    check_parts(config)
    if dry_run:
        print(json.dumps(config.model_dump(by_alias=True, mode="json"), indent=2))
        return
    if resume is not None:
        _take_up(folder, config)
    else:
        folder = RunFolder.create(config, out)
        origin = folder.read_json("origin.json")
        folder.write_json("origin.json", {**origin, "run_file_folder": str(beside.resolve())})
    from ludic.runs.stages import TrainingRun

    asyncio.run(TrainingRun(config, folder).go())


def _with_whole_path(config: RunConfig) -> RunConfig:
    """The run with its data's whole path: it may be resumed from another working directory."""
    if config.sft is None or config.sft.data is None:
        return config
    data = str(Path(config.sft.data).resolve())
    return config.model_copy(update={"sft": config.sft.model_copy(update={"data": data})})


def _resumed(folder: RunFolder, overrides: Sequence[str]) -> RunConfig:
    """The run's own configuration. Only more steps may be asked for: anything else would be
    another run."""
    data = folder.read_json("run.json")
    training = data.get("training", {})
    if "micro_token_budget" in training and "max_seq_len" in training:
        # Folders from before this was refused hold a smaller one, and trained with the larger.
        budget = max(training["micro_token_budget"], training["max_seq_len"])
        training["micro_token_budget"] = budget
    free = {"training.steps", "training.checkpoint_every", "logging.loggers"}
    if folder.config().training.past_opponents:
        free.remove("training.checkpoint_every")  # it also says when a past opponent is taken
    for override in overrides:
        key = apply_override(data, override)
        if key not in free:
            raise ConfigError(
                f"{key} cannot change when a run is resumed: start a new run, or change only "
                f"{', '.join(sorted(free))}"
            )
    return check_run(data, source=str(folder.path / "run.json"))


def _take_up(folder: RunFolder, config: RunConfig) -> None:
    """Makes `config` the folder's; where it has other steps, the end is measured again."""
    if config.training.steps != folder.config().training.steps:
        for stale in ("eval/after_rl.json", "summary.json"):
            (folder.path / stale).unlink(missing_ok=True)
    folder.write_json("run.json", config.model_dump(by_alias=True, mode="json"))
