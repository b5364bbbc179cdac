"""A run: how it is put together, started and stopped. `parts` has what it is made of, `stages`
what it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError
from ludic.plumbing.given import bind_objects
from ludic.runs import episodes
from ludic.runs.check import check_parts
from ludic.runs.interruption import blocking
from ludic.runs.locate import check_given
from ludic.runs.parts import RunParts
from ludic.runs.results.report import RunReport
from ludic.runs.results.terminal import Update
from ludic.runs.settings import RunConfig, find_run, override_key
from ludic.runs.settings.from_python import PARTS, given_again, read_arguments, script_folder
from ludic.runs.settings.reading import builtin_runs
from ludic.runs.stages import Stages
from ludic.runs.storage import RunFolder


class Run(RunParts):
    """One training run: evaluation, cold start, RL, each followed by an evaluation.

    The arguments are the sections of a run file, each a dict or an object, and a few shortcuts:
    `parser`, `steps`, `learning_rate`, `seed`, `name` and `out`, the run folder to make. Where a
    run file names a part, an object will do. `Run(…)` checks and assembles, `go()` starts; between
    the two, `model`, `tokenizer`, `client`, `publisher`, `algorithm`, `source`, `trainer`,
    `loggers`, `callbacks` and `folder` can be looked at and replaced. A callback is called with
    an `Update` after every one, and awaited if it is async.
    """

    def __init__(
        self,
        env: Any,
        *,
        model: Any = None,
        algorithm: Any = None,
        parser: Any = None,
        steps: int | None = None,
        learning_rate: float | None = None,
        seed: int | None = None,
        name: str | None = None,
        out: str | Path | None = None,
        protocol: Any = None,
        reference: Any = None,
        teacher: Any = None,
        player: Any = None,
        curriculum: Any = None,
        training: Any = None,
        pipeline: Any = None,
        cluster: Any = None,
        inference: Any = None,
        eval: Any = None,
        sft: Any = None,
        logging: Any = None,
        run: Any = None,
        callbacks: Sequence[Callable[[Update], object]] = (),
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "out", "callbacks")}
        config, objects = read_arguments(arguments)
        self._assemble(config, objects, script_folder(), RunFolder.planned(config, out))
        self.callbacks = list(callbacks)
        self.given = {k: v for k, v in arguments.items() if v is not None and k in PARTS}

    @classmethod
    def from_file(
        cls,
        run: str | Path | None,
        overrides: Sequence[str] = (),
        *,
        out: str | Path | None = None,
        only_sft: bool = False,
    ) -> Run:
        """Assembles the run of a file, or a built-in one by name, with `section.key=value`
        overrides. With `only_sft` it must have a cold start, and ends after it."""
        if run is None:
            raise ConfigError(f"name a run file, or one of the built-in runs: {builtin_runs()}")
        if only_sft:
            overrides = [*overrides, "training.steps=0"]
        config, modules = find_run(str(run), overrides)
        if config.sft is None and only_sft:
            raise ConfigError(f"{run} has no cold start: add an [sft] table with a teacher or data")
        return cls.of_config(config, RunFolder.planned(config, out), modules)

    @classmethod
    def of_config(cls, config: RunConfig, folder: RunFolder, modules: Path) -> Run:
        """Assembles a checked configuration; `modules` is the folder of modules it may name."""
        self = cls.__new__(cls)
        self._assemble(config, {}, modules, folder)
        return self

    @classmethod
    def from_folder(cls, folder: str | Path, overrides: Sequence[str] = (), **parts: Any) -> Run:
        """Assembles what is left of the run in a folder. Only a few settings may change: with any
        other it would be another run. `parts` are those that were objects of a script."""
        opened = RunFolder.open(folder)
        free = {"training.steps", "training.checkpoint_every", "training.rank_timeout_s"}
        free.add("logging.loggers")
        if opened.config().training.past_opponents:
            free.remove("training.checkpoint_every")  # it also says when a past opponent is taken
        for key in map(override_key, overrides):
            if key not in free and not key.startswith("cluster"):
                raise ConfigError(
                    f"{key} cannot change when a run is resumed: start a new run, or change only "
                    f"{', '.join(sorted(free))}"
                )
        config = opened.config(overrides)
        self = cls.__new__(cls)
        self._assemble(config, given_again(config, parts), opened.modules, opened)
        self.given, self.resumed = parts, True
        return self

    def _assemble(
        self, config: RunConfig, objects: Mapping[str, Any], modules: Path, folder: RunFolder
    ) -> None:
        super().__init__(config, objects)
        self._stages = Stages(self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.modules, self.folder = modules, folder
        with bind_objects(self.objects):
            episodes.import_user_modules(config, modules)
            check_given(config, str(folder.path))
            check_parts(config)

    def __repr__(self) -> str:
        return f"Run({str(self.folder.path)!r})"

    # Starting and stopping

    def go(self) -> Run:
        """Trains to the end, or until `stop()` or Ctrl-C. Works where an event loop is running,
        too, as in a notebook: the run then has a thread of its own."""
        blocking(self.go_async, on_interrupt=self.stop)
        return self

    async def go_async(self) -> Run:
        """`go` for callers in an event loop."""
        self._loop = asyncio.get_running_loop()
        with bind_objects(self.objects):
            await self._stages.go()
        return self

    def stop(self) -> None:
        """Ends the run after the current step, with a checkpoint. Any thread may call it."""
        loop, stages = self._loop, self._stages
        if loop is not None and loop.is_running() and loop is not asyncio._get_running_loop():
            loop.call_soon_threadsafe(stages.stop)
        else:
            stages.stop()

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped before its end."""
        return self._stages.stopped

    @property
    def report(self) -> RunReport:
        """What the evaluations found, before and after each stage, with intervals."""
        stages, outcomes = self._stages, tuple(self.config.eval.outcomes)
        return RunReport(stages.reports, outcomes, tuple(stages.warnings()))

    def read_reports(self) -> None:
        """Takes the reports that the folder has, of a run that another process trained."""
        self._stages.read_reports()
