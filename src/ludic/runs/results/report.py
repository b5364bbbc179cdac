"""What a run's evaluations found, stage by stage."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ludic.errors import ConfigError
from ludic.eval import EvalReport
from ludic.runs.results.terminal import PlainConsole, stages_table


@dataclass(frozen=True)
class RunReport:
    """The evaluations of a run by stage: `before`, `after_sft`, `after_rl`. Printed, it is a table
    with 95 % intervals. `warnings` say what went wrong, with the setting to look at."""

    stages: Mapping[str, EvalReport]
    outcomes: Sequence[str] = field(default=(), repr=False)
    warnings: Sequence[str] = ()

    @property
    def before(self) -> EvalReport:
        """The untrained policy."""
        return self._stage(0)

    @property
    def after(self) -> EvalReport:
        """The policy after the last stage."""
        return self._stage(-1)

    def _stage(self, index: int) -> EvalReport:
        if not self.stages:
            raise ConfigError("there is no evaluation yet: the run has not begun")
        return list(self.stages.values())[index]

    def __str__(self) -> str:
        if not self.stages:
            return "no evaluation yet"
        text = io.StringIO()
        PlainConsole(file=text, width=120).print(stages_table(self.stages, self.outcomes))
        warnings = "".join(f"\nwarning: {sentence}" for sentence in self.warnings)
        return text.getvalue().rstrip() + "\n" * bool(warnings) + warnings

    __repr__ = __str__
