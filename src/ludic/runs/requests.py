"""The episodes of a run as requests: one per environment, with the teacher that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ludic.errors import ConfigError, UnknownNameError
from ludic.rollouts import RolloutRequest
from ludic.runs.settings import EnvSection, RunConfig
from ludic.runs.settings.from_python import key_of
from ludic.saw.statistics import ENV
from ludic.types import EnvSpec, ProtocolSpec

TEACHER = "teacher"
"""The key in the `meta` of a request and its rollouts that names their teacher."""


def requests_of(
    config: RunConfig, *, held_out: bool = False
) -> Mapping[str, tuple[RolloutRequest, float]]:
    """Returns one request per environment of the run, with its share, by name. With `held_out`,
    those of the evaluation, which may have other environments and another protocol."""
    envs, part = config.env, config.protocol
    if held_out:
        envs, part = config.eval.env or envs, config.eval.protocol or part
    protocol = ProtocolSpec(part.kind, part.kwargs)
    named: dict[str, EnvSection] = {}
    for section in envs:
        name = section.name or key_of(section.kind)
        while name in named:
            name += "+"
        named[name] = section
    teachers = {} if held_out else teachers_by_env(config, list(named))
    return {
        name: (
            RolloutRequest(
                EnvSpec(section.kind, section.kwargs),
                protocol,
                meta={
                    **({ENV: name} if len(named) > 1 else {}),
                    **({TEACHER: teachers[name]} if name in teachers else {}),
                },
            ),
            section.weight,
        )
        for name, section in named.items()
    }


def teachers_by_env(config: RunConfig, envs: Sequence[str]) -> Mapping[str, str]:
    """Returns the teacher of each environment, by name; empty if there is only one for all. Raises
    if one has none, or two."""
    teachers = config.teacher
    for number, teacher in enumerate(teachers, 1):
        for env in teacher.envs:
            if env not in envs:
                raise UnknownNameError(f"environment of teacher {number},", env, envs)
    if len(teachers) < 2:
        return {}
    rest = [i for i, t in enumerate(teachers) if not t.envs and not t.tasks]
    if len(rest) > 1:
        raise ConfigError(
            f"teachers {rest[0] + 1} and {rest[1] + 1} both say neither `envs` nor `tasks`: say "
            f"which is for what, as in envs = [{envs[0]!r}]"
        )
    found: dict[str, str] = {}
    for env in envs:
        own = [i for i, t in enumerate(teachers) if env in t.envs]
        if len(own) > 1:
            raise ConfigError(
                f"teachers {own[0] + 1} and {own[1] + 1} are both for environment {env!r}"
            )
        if own or rest:
            found[env] = teacher_name((own or rest)[0])
        elif not any(t.tasks for t in teachers):
            raise ConfigError(f"no teacher is for environment {env!r}: name it in one's `envs`")
    return found


def teacher_name(index: int) -> str:
    """What the rollouts of a run call its teachers."""
    return f"teacher-{index + 1}"
