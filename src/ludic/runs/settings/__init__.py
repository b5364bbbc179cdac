"""A run is one TOML file plus overrides, checked before anything starts.

`load_run("run.toml", ["training.learning_rate=1e-5"])` returns a `RunConfig`, or raises a
`ConfigError` that names the key, the nearest right one, and the line.
"""

from ludic.runs.settings.base import Section as Section
from ludic.runs.settings.inference import InferenceSection as InferenceSection
from ludic.runs.settings.inference import SamplingSection as SamplingSection
from ludic.runs.settings.parts import EnvSection as EnvSection
from ludic.runs.settings.parts import ModelSection as ModelSection
from ludic.runs.settings.parts import OtherModelSection as OtherModelSection
from ludic.runs.settings.parts import PlayerSection as PlayerSection
from ludic.runs.settings.parts import TeacherSection as TeacherSection
from ludic.runs.settings.reading import apply_override as apply_override
from ludic.runs.settings.reading import check_run as check_run
from ludic.runs.settings.reading import find_run as find_run
from ludic.runs.settings.reading import load_run as load_run
from ludic.runs.settings.reading import override_key as override_key
from ludic.runs.settings.reading import parse_run as parse_run
from ludic.runs.settings.run import ClusterSection as ClusterSection
from ludic.runs.settings.run import EvalSection as EvalSection
from ludic.runs.settings.run import PipelineSection as PipelineSection
from ludic.runs.settings.run import RunConfig as RunConfig
from ludic.runs.settings.run import TrainingSection as TrainingSection
