"""A run is one TOML file plus overrides, checked before anything starts.

`load_run("run.toml", ["training.learning_rate=1e-5"])` returns a `RunConfig`, or raises a
`ConfigError` that names the key, the nearest right one, and the line.
"""

from ludic.runs.settings.base import Arguments, PartSection, Section
from ludic.runs.settings.curriculum import CurriculumSection, StageSection
from ludic.runs.settings.inference import InferenceSection, SamplingSection
from ludic.runs.settings.model import LoraSection, ModelSection
from ludic.runs.settings.others import (
    OtherModelSection,
    PlayerSection,
    ReferenceSection,
    TeacherSection,
)
from ludic.runs.settings.parts import AlgorithmSection, EnvSection, ProtocolSection
from ludic.runs.settings.pipeline import PipelineSection
from ludic.runs.settings.reading import apply_override, check_run, load_run, override_key, parse_run
from ludic.runs.settings.run import SCHEMA, LoggingSection, RunConfig, RunSection
from ludic.runs.settings.stages import EvalSection, SFTSection, TrainingSection

__all__ = [
    "SCHEMA",
    "AlgorithmSection",
    "Arguments",
    "CurriculumSection",
    "EnvSection",
    "EvalSection",
    "InferenceSection",
    "LoggingSection",
    "LoraSection",
    "ModelSection",
    "OtherModelSection",
    "PartSection",
    "PipelineSection",
    "PlayerSection",
    "ProtocolSection",
    "ReferenceSection",
    "RunConfig",
    "RunSection",
    "SFTSection",
    "SamplingSection",
    "Section",
    "StageSection",
    "TeacherSection",
    "TrainingSection",
    "apply_override",
    "check_run",
    "load_run",
    "override_key",
    "parse_run",
]
