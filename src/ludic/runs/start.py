"""Starting and resuming runs, which are checked as a whole before anything is written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ludic.errors import ConfigError
from ludic.runs.assemble import make_importable
from ludic.runs.check import check_parts
from ludic.runs.locate import builtin_runs, find_run
from ludic.runs.settings import RunConfig, override_key
from ludic.runs.storage.folder import RunFolder
from ludic.runs.storage.lock import locked
from ludic.runs.training_run import TrainingRun


@dataclass(frozen=True)
class PlannedRun:
    """A run that passed its checks. `modules` is the folder of the modules it names; `folder` is
    the run folder, if it is resumed."""

    config: RunConfig
    modules: Path
    folder: RunFolder | None = None

    def carry_out(self, out: Path | None = None) -> None:
        """Trains to the end, or until Ctrl-C. A new run goes to `out`, or to a folder by its
        name."""
        folder = self.folder or RunFolder.create(self.config, out, modules=self.modules)
        with locked(folder.path):
            if self.folder is not None:
                folder.take_up(self.config)
            asyncio.run(TrainingRun(self.config, folder).go())


def plan_run(
    run: str | None, overrides: Sequence[str] = (), *, only_sft: bool = False
) -> PlannedRun:
    """Plans a new run, by file or name. With `only_sft` it must have a cold start."""
    if run is None:
        raise ConfigError(f"name a run file, or one of the built-in runs: {builtin_runs()}")
    config, modules = find_run(run, overrides)
    if config.sft is not None and config.sft.data is not None:
        # The whole path: the run may be resumed from another working directory.
        sft = config.sft.model_copy(update={"data": str(Path(config.sft.data).resolve())})
        config = config.model_copy(update={"sft": sft})
    elif config.sft is None and only_sft:
        raise ConfigError(f"{run} has no cold start: add an [sft] table with a teacher or data")
    return _checked(PlannedRun(config, modules))


def plan_resume(run: str | Path, overrides: Sequence[str] = ()) -> PlannedRun:
    """Plans what is left of the run in a folder. Only a few settings may change: with any other it
    would be another run."""
    folder = RunFolder.open(run)
    free = {"training.steps", "training.checkpoint_every", "logging.loggers"}
    if folder.config().training.past_opponents:
        free.remove("training.checkpoint_every")  # it also says when a past opponent is taken
    for key in map(override_key, overrides):
        if key not in free:
            raise ConfigError(
                f"{key} cannot change when a run is resumed: start a new run, or change only "
                f"{', '.join(sorted(free))}"
            )
    return _checked(PlannedRun(folder.config(overrides), folder.modules, folder))


def _checked(plan: PlannedRun) -> PlannedRun:
    make_importable(plan.modules)
    check_parts(plan.config)
    return plan
