"""Which environments come when."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ludic.runs.settings.base import Section
from ludic.runs.settings.parts import as_list


class StageSection(Section):
    """One stage of a curriculum: the run's environments that it mixes, by name. It is over after
    `episodes`, or once `solve_rate` of the last `window` episodes reached a reward of `threshold`,
    whichever comes first; the last stage needs neither."""

    envs: list[str] = Field(min_length=1)
    episodes: int | None = Field(default=None, ge=1)
    solve_rate: float | None = Field(default=None, gt=0, le=1)
    window: int = Field(default=64, ge=1)
    threshold: float = 1.0


class CurriculumSection(Section):
    """Which of the run's environments come next. `mix`: all, in proportion to their weights.
    `stages`: one `[[curriculum.stage]]` after another. `target_solve_rate`: those that are neither
    hopeless nor done, `width` around a rate of `target`; `learning_rate` is how fast the estimate
    follows, `floor` lets none be forgotten. `uncertain`: those whose outcome is least certain, by
    the values that the algorithm `spo` tracks. With `tasks_per_env`, each environment is that many
    tasks with a fixed seed each, and not one."""

    kind: Literal["mix", "stages", "target_solve_rate", "uncertain"] = "mix"
    stage: Annotated[list[StageSection], BeforeValidator(as_list)] = []
    tasks_per_env: int | None = Field(default=None, ge=1)
    target: float = Field(default=0.5, gt=0, lt=1)
    width: float = Field(default=0.2, gt=0)
    floor: float = Field(default=0.05, ge=0)
    learning_rate: float = Field(default=0.1, gt=0, le=1)
    threshold: float = 1.0
