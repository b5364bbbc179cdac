"""A run is one TOML file plus overrides, checked before anything starts.

`load_run("run.toml", ["training.learning_rate=1e-5"])` returns a `RunConfig`, or raises a
`ConfigError` that names the key, the nearest right one, and the line.
"""

from ludic.runs.settings.base import Section
from ludic.runs.settings.inference import InferenceSection, SamplingSection
from ludic.runs.settings.parts import (
    EnvSection,
    ModelSection,
    OtherModelSection,
    PlayerSection,
    TeacherSection,
)
from ludic.runs.settings.reading import apply_override, check_run, load_run, override_key, parse_run
from ludic.runs.settings.run import EvalSection, PipelineSection, RunConfig, TrainingSection

__all__ = [
    "EnvSection",
    "EvalSection",
    "InferenceSection",
    "ModelSection",
    "OtherModelSection",
    "PipelineSection",
    "PlayerSection",
    "RunConfig",
    "SamplingSection",
    "Section",
    "TeacherSection",
    "TrainingSection",
    "apply_override",
    "check_run",
    "load_run",
    "override_key",
    "parse_run",
]
