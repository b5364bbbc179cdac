"""Tasks of reasoning-gym: one generated question, one answer, the task's own score."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from functools import lru_cache
from typing import Any

from ludic.envs.adapters import load_package
from ludic.envs.adapters.episode_random import EpisodeRandom, give_own_random
from ludic.envs.single_agent_env import SingleAgentEnv
from ludic.errors import ConfigError, UnknownNameError
from ludic.seeding import derive_seed
from ludic.types import Action, Info, Obs, StepOutcome


@dataclass(eq=False, repr=False)
class ReasoningGymEnv(SingleAgentEnv):
    """One question of a task, one answer, judged by the task itself, from 0 to 1.

    The seed picks the question, so that the episodes of a group share it. The action is the bare
    answer: give the agent a parser that finds it. An answer that the task's scoring cannot read,
    and raises for, scores 0; `info["score_error"]` then says what it raised.

    Args:
        task: A task's name, as in `reasoning_gym.create_dataset`.
        level: The difficulty on the scale of the task's own curriculum, from 0: one number for
            all of its attributes (each stops at its highest), or a number for each by name. By
            default the task's usual settings.
        config: Settings of the task, such as `{"max_terms": 4}`; they go before the level's. Those
            of `composite` are `{"datasets": [{"name": …, "weight": …, "config": {…}}]}`.
        size: How many different questions there are.
        dataset_seed: Which questions they are; take another for held-out ones.
        index: Always this question, whatever the seed.
        template: The observation; `{question}` stands for the question.
        system_prompt: Suggested to the agent; "" means none at all.
    """

    task: str
    _: KW_ONLY
    level: int | Mapping[str, int] | None = None
    config: Mapping[str, Any] | None = None
    size: int = 1000
    dataset_seed: int = 0
    index: int | None = None
    template: str = "{question}"
    system_prompt: str | None = "Solve the task. Give the answer and nothing else."

    def __post_init__(self) -> None:
        if "{question}" not in self.template:
            raise ConfigError(f"the template {self.template!r} has no place for {{question}}")
        if self.size < 1 or (self.index is not None and not 0 <= self.index < self.size):
            raise ConfigError(f"reasoning_gym: index {self.index} of a task with size={self.size}")
        load_package("reasoning_gym", "reasoning_gym")
        level = json.dumps(self.level, sort_keys=True)
        config = json.dumps(self.config or {}, sort_keys=True)
        with _making:  # many environments start at once: one makes it, the others find it there
            self._questions = _made(self.task, level, config, self.size, self.dataset_seed)
        self._entry: Mapping[str, Any] = {}
        self._key: str | None = None

    @property
    def return_range(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        seed = secrets.randbits(63) if seed is None else seed
        index = derive_seed(seed, "row") % self.size if self.index is None else self.index
        self._entry = self._questions.entry(index)
        self._key = f"{self._questions.name}#{index}"
        return self.env_current_obs(), {"task": self._key}

    def env_step(self, action: Action) -> StepOutcome:
        target = self._entry.get("answer")
        info: dict[str, Any] = {"target": None if target is None else str(target)}
        try:
            score = self._questions.score(action, self._entry)
        except Exception as error:  # the scorers of some tasks raise for what they cannot read
            score = 0.0
            info["score_error"] = f"{type(error).__name__}: {error}"
        return StepOutcome("", score, terminated=True, info=info)

    def env_current_obs(self) -> Obs:
        return self.template.replace("{question}", str(self._entry.get("question", "")))

    def suggested_sysprompt(self, agent_id: str) -> str | None:
        return self.system_prompt

    def task_key(self) -> str | None:
        return self._key


class _Questions:
    """A task's questions, made when they are first asked for. Several threads share it: one at a
    time is in the dataset, and its NumPy draws come from a generator of that call's alone."""

    def __init__(self, name: str, dataset: Any, seed: int) -> None:
        self.name = name
        self._dataset, self._seed = dataset, seed
        self._busy = threading.Lock()
        self.entry = lru_cache(maxsize=256)(self._entry)

    def _entry(self, index: int) -> Mapping[str, Any]:
        with self._busy, EpisodeRandom(derive_seed(self._seed, index)).drawn_from():
            entry: Mapping[str, Any] = self._dataset[index]
            return entry

    def score(self, answer: str, entry: Mapping[str, Any]) -> float:
        with self._busy, EpisodeRandom(0).drawn_from():
            return float(self._dataset.score_answer(answer=answer, entry=entry))


_making = threading.Lock()


@lru_cache(maxsize=32)
def _made(task: str, level: str, config: str, size: int, seed: int) -> _Questions:
    factory = load_package("reasoning_gym.factory", "reasoning_gym")
    if task not in factory.DATASETS:
        raise UnknownNameError("task of reasoning-gym", task, factory.DATASETS)
    give_own_random("reasoning_gym")
    settings: dict[str, Any] = {}
    if level != "null":
        settings |= _settings_at(factory, task, json.loads(level))
    settings |= json.loads(config)
    settings |= {"size": size, "seed": seed}
    if task == "composite" and isinstance(settings.get("datasets"), list):
        spec = load_package("reasoning_gym.composite", "reasoning_gym").DatasetSpec
        settings["datasets"] = [spec(**one) for one in settings["datasets"]]
    try:
        with EpisodeRandom(seed).drawn_from():
            dataset = factory.create_dataset(task, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym cannot make {task!r} with {config}: {error}") from error
    return _Questions(_name(task, level, config, seed), dataset, seed)


def _settings_at(factory: Any, task: str, level: int | Mapping[str, int]) -> dict[str, Any]:
    """The task's settings at a level of its own curriculum."""
    if not factory.has_curriculum(task):
        raise ConfigError(f"the task {task!r} has no levels in reasoning-gym: leave `level` out")
    curriculum = factory.create_curriculum(task)
    try:
        if isinstance(level, Mapping):
            for attribute, value in level.items():
                curriculum.set_attr_level(attribute, value)
        else:
            if level < 0:
                raise ValueError("levels begin at 0")
            curriculum.set_global_level(level)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"level={level!r} of the task {task!r}: {error}; its attributes are "
            f"{ {name: f'0 to {len(a.levels) - 1}' for name, a in curriculum.attributes.items()} }"
        ) from error
    return asdict(curriculum.generate_configuration())


def _name(task: str, level: str, config: str, seed: int) -> str:
    """The task with all that decides on its questions."""
    name = task
    if level != "null":
        name += f"@{level}"
    if config != "{}":
        name += f"~{hashlib.blake2b(config.encode(), digest_size=4).hexdigest()}"
    return f"{name}/{seed}"
