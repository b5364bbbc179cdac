"""The curriculum of a run, from its settings."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from ludic.errors import ConfigError, UnknownNameError
from ludic.rollouts import Curriculum, FixedMix, RolloutRequest, Stage, Stages, TargetSolveRate
from ludic.runs.episodes import requests_of
from ludic.runs.settings import RunConfig
from ludic.seeding import derive_seed
from ludic.training import RLAlgorithm, UncertainTasks
from ludic.training.credit_assignment.value_tracker import TrackedAdvantage

_Mix = Mapping[str, tuple[RolloutRequest, float]]
ADAPTIVE = ("target", "width", "floor", "learning_rate", "threshold")


def make_curriculum(config: RunConfig, algorithm: RLAlgorithm, *, seed: int) -> Curriculum:
    """Returns what decides on the run's episodes; raises if its settings do not fit."""
    section, mix = config.curriculum, requests_of(config)
    _check_fit(config)
    match section.kind:
        case "stages":
            return _stages(config, mix, seed)
        case "target_solve_rate":
            options = section.model_dump(include=set(ADAPTIVE))
            return TargetSolveRate(_tasks(config, mix, seed), **options, seed=seed)
        case "uncertain":
            credit = algorithm.credit_assigner
            if not isinstance(credit, TrackedAdvantage):
                raise ConfigError(
                    "curriculum.kind='uncertain' needs an algorithm that tracks values, and "
                    f"{config.algorithm.name!r} does not: set algorithm.name='spo', or "
                    "curriculum.kind='target_solve_rate'"
                )
            return UncertainTasks(
                _tasks(config, mix, seed), credit.tracker, eps=section.floor or 1e-6, seed=seed
            )
    return FixedMix(mix, seed=seed)


def _check_fit(config: RunConfig) -> None:
    """Raises if a key was set that this kind of curriculum does not use."""
    section = config.curriculum
    used = {
        "mix": (),
        "stages": ("stage",),
        "target_solve_rate": ("tasks_per_env", *ADAPTIVE),
        "uncertain": ("tasks_per_env", "floor"),
    }
    for name, field in type(section).model_fields.items():
        if name == "kind" or name in used[section.kind]:
            continue
        if getattr(section, name) != field.get_default():
            for_it = [kind for kind, keys in used.items() if name in keys]
            raise ConfigError(
                f"curriculum.{name} is not for curriculum.kind={section.kind!r}: set it to "
                f"{' or '.join(map(repr, for_it))}, or leave {name} out"
            )
    if config.training.past_opponents and section.kind != "mix":
        raise ConfigError(
            f"training.past_opponents chooses the episodes itself: leave curriculum.kind="
            f"{section.kind!r} out"
        )


def _stages(config: RunConfig, mix: _Mix, seed: int) -> Stages:
    sections = config.curriculum.stage
    if not sections:
        raise ConfigError(
            "curriculum.kind='stages' needs its stages: add [[curriculum.stage]] tables with "
            "`envs`, and `episodes` or `solve_rate`"
        )
    stages: list[Stage] = []
    for number, section in enumerate(sections):
        for env in section.envs:
            if env not in mix:
                raise UnknownNameError(f"environment of curriculum stage {number + 1},", env, mix)
        part = FixedMix({e: mix[e] for e in section.envs}, seed=derive_seed(seed, "stage", number))
        stages.append(Stage(part, **section.model_dump(exclude={"envs"})))
    return Stages(stages)


def _tasks(config: RunConfig, mix: _Mix, seed: int) -> Mapping[str, RolloutRequest]:
    count = config.curriculum.tasks_per_env
    if count is None:
        return {name: request for name, (request, _) in mix.items()}
    return {
        f"{name}#{i}": structs.replace(request, env_seed=derive_seed(seed, name, "task", i))
        for name, (request, _) in mix.items()
        for i in range(count)
    }
