"""One setting has one default, wherever it is said."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

from ludic.inference import LocalChatClient, SamplingConfig
from ludic.rollouts import RolloutEngine
from ludic.runs.episodes import inference_spec
from ludic.runs.model import trainer_config
from ludic.runs.settings import (
    SamplingSection,
    TrainingSection,
    parse_run,
)
from ludic.training import CheckpointConfig, TrainerConfig
from tools import settings_page

RUN = parse_run('[env]\nkind = "tic_tac_toe"\n')
OF_THE_RUN = {"total_steps", "seed", "checkpoint", "run_dir", "eval_every", "precision"}
"""What a run sets itself, from other keys."""


def test_a_run_that_says_nothing_trains_as_a_trainer_that_is_told_nothing() -> None:
    made, default = trainer_config(RUN, "rl", Path("folder")), TrainerConfig()
    for field in fields(TrainerConfig):
        if field.name not in OF_THE_RUN:
            assert getattr(made, field.name) == getattr(default, field.name), field.name
    assert default.seed == RUN.run.seed  # of which a run makes one for each stage
    kept = CheckpointConfig("folder")
    assert made.checkpoint is not None
    assert (made.checkpoint.every, made.checkpoint.keep) == (kept.every, kept.keep)


def test_a_run_file_can_say_everything_that_a_trainer_can_be_told() -> None:
    keys = {field.name for field in fields(TrainerConfig)} - OF_THE_RUN
    assert keys <= TrainingSection.model_fields.keys()


def test_the_engines_have_the_runs_defaults() -> None:
    engine = inspect.signature(RolloutEngine).parameters
    for name in ("step_timeout_s", "episode_timeout_s", "lost_member"):
        assert getattr(RUN.training, name) == engine[name].default
    client = inspect.signature(LocalChatClient).parameters
    assert RUN.slots == client["max_slots"].default
    for name in ("max_context_tokens", "deterministic"):
        assert getattr(RUN.inference, name) == client[name].default
    plain = SamplingConfig(max_tokens=SamplingSection().max_tokens)
    assert inference_spec(RUN).sampling == plain


def test_every_key_says_what_it_does_and_nothing_else_is_described(repo_root: Path) -> None:
    page = (repo_root / "docs" / "run_file.md").read_text(encoding="utf-8")
    texts = settings_page.descriptions(page)
    assert texts.keys() == set(settings_page.keys())
    assert all(text.strip() for text in texts.values())


def test_the_docs_table_is_that_of_the_settings(repo_root: Path) -> None:
    page = (repo_root / "docs" / "run_file.md").read_text(encoding="utf-8")
    tables = settings_page.reference(settings_page.descriptions(page))
    assert tables in page, "write them with: python -m tools.settings_page --write"
