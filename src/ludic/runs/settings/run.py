"""The whole run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ludic.runs.settings.base import Arguments, Section
from ludic.runs.settings.curriculum import CurriculumSection
from ludic.runs.settings.inference import InferenceSection
from ludic.runs.settings.model import ModelSection
from ludic.runs.settings.others import Players, ReferenceSection, Teachers
from ludic.runs.settings.parts import AlgorithmSection, Envs, ProtocolSection
from ludic.runs.settings.pipeline import PipelineSection
from ludic.runs.settings.stages import EvalSection, SFTSection, TrainingSection

SCHEMA = 1


class RunSection(Section):
    """Which run this is, and where it is kept. The same `seed` and `threads` on a CPU give the
    same run, to the bit; without `threads`, torch takes as many as there are cores. `imports` are
    modules to import first: what they register can then be named."""

    name: str = "run"
    seed: int = 0
    folder: str = "runs"
    threads: int | None = Field(default=None, ge=1)
    imports: list[str] = []


class LoggingSection(Section):
    """Where metrics go besides `metrics.jsonl`, which is always written. A logger is a name
    (`"live"`, `"console"`, `"wandb"`, `"tensorboard"`, `"trackio"`, or one that was registered),
    its place (`"module:Class"`), or a table with its `kind` and arguments:
    `{ kind = "wandb", project = "mine" }`."""

    loggers: list[str | Arguments] = ["live"]
    keep_rollouts: bool = True
    keep_tokens: bool = True


class RunConfig(Section):
    """The whole run, resolved."""

    schema_version: int = Field(default=SCHEMA, alias="schema")
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    inference: InferenceSection = InferenceSection()
    env: Annotated[Envs, Field(min_length=1)]
    protocol: ProtocolSection = ProtocolSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    reference: ReferenceSection | None = None
    teacher: Teachers = []
    player: Players = []
    curriculum: CurriculumSection = CurriculumSection()
    training: TrainingSection = TrainingSection()
    pipeline: PipelineSection | None = None
    sft: SFTSection | None = None
    eval: EvalSection = EvalSection()
    logging: LoggingSection = LoggingSection()

    def plain(self) -> dict[str, Any]:
        """Returns the run as JSON, from which `check_run` makes the same run."""
        return self.model_dump(by_alias=True, mode="json")
