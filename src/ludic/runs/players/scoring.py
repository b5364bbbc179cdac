"""The models that score a run's samples: a reference to stay near, teachers to learn from."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ludic.errors import CheckpointError, ConfigError
from ludic.inference import VLLMChatClient
from ludic.plumbing.files import replacing
from ludic.plumbing.precision import Precision
from ludic.registry import ALGORITHMS
from ludic.runs.episodes import TEACHER
from ludic.runs.model import precision_of
from ludic.runs.players.models import check_other, check_vocabulary, client_of, load_other, opened
from ludic.runs.settings import OtherModelSection, RunConfig, TeacherSection
from ludic.runs.settings.parts import teacher_name, teachers_by_env
from ludic.saw.items import SAWItem
from ludic.training import RLAlgorithm
from ludic.training.algorithms.opd import OnPolicyDistillationLoss
from ludic.training.batching import scoring
from ludic.training.losses.composite import TokenKLLoss
from ludic.training.preprocess import KLInReward, steps_of
from ludic.training.types import parts_of


class Scoring:
    """A run's scorers. While `opened`, their servers are connected; before, they cannot score."""

    def __init__(
        self, config: RunConfig, model: nn.Module, tokenizer: Any, folder: Path, *, sharded: bool
    ) -> None:
        self._config, self._tokenizer, self._sharded = config, tokenizer, sharded
        self._start: StartScores | None = None
        self._servers: list[VLLMChatClient] = []
        self.scorers: list[scoring.BatchScorer] = []
        if not config.training.steps:
            return
        if (reference := config.reference) is not None:
            start = reference.model == "start"
            scores = self._of_start(model, folder) if start else self._of(reference, "reference")
            self.scorers.append(scoring.ReferenceScorer(scores))
        if teachers := config.teacher:
            models = {
                teacher_name(i): self._of(t, f"teacher {i + 1}") for i, t in enumerate(teachers)
            }
            only = len(models) == 1
            scores = (
                models[teacher_name(0)] if only else scoring.RoutedScores(models, _router(teachers))
            )
            self.scorers.append(scoring.TeacherScorer(scores))

    def _of(self, section: OtherModelSection, where: str) -> scoring.TokenScores:
        if section.server is not None:
            client = client_of(section, where)
            self._servers.append(client)
            return _ServerScores(client)
        model, tokenizer = load_other(self._config, section, where)
        check_vocabulary(self._tokenizer, tokenizer, where)
        return scoring.LocalScores(model, precision=precision_of(self._config))

    def _of_start(self, model: nn.Module, folder: Path) -> scoring.TokenScores:
        precision = precision_of(self._config)
        if start_is_below_adapter(self._config, sharded=self._sharded):
            return scoring.LocalScores(model, without_adapter=True, precision=precision)
        file = folder / "reference" / "weights.safetensors"
        self._start = StartScores(model, file, precision)
        return self._start

    def take_start(self) -> None:
        """Keeps the policy as it is now, where the reference is the policy at the start: once it is
        sharded, no rank could read it alone."""
        if self._start is not None:
            self._start.take()

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Connects to the servers, and closes their clients at the end."""
        return opened((client, self._tokenizer) for client in self._servers)


def start_is_below_adapter(config: RunConfig, *, sharded: bool) -> bool:
    """Whether the policy at the start is the model without its adapter, so that no copy is needed:
    nobody samples while a batch is scored, and a new adapter changes nothing."""
    untouched = config.sft is None or not config.sft.steps
    alone = not config.training.overlap and not sharded
    return config.model.lora is not None and untouched and alone


class StartScores:
    """Scores with a copy of a model as it is when it first scores. Its weights are kept in `file`,
    so that a resumed run stays near the same policy."""

    def __init__(self, model: nn.Module, file: Path, precision: Precision) -> None:
        self._model, self._file = model, file
        self._copy = copy.deepcopy(model).eval().requires_grad_(False)
        self._scores = scoring.LocalScores(self._copy, precision=precision)
        self._taken = False

    async def logprobs(self, items: Sequence[SAWItem]) -> scoring.Scores:
        """The log-probs of the starting policy."""
        await asyncio.to_thread(self.take)
        return await self._scores.logprobs(items)

    def take(self) -> None:
        """Takes the weights, unless they were taken before."""
        from safetensors.torch import load_file, save_file

        if self._taken:
            return
        trained = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        if not self._file.is_file():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            own = {n: p.detach().to("cpu", copy=True).contiguous() for n, p in trained.items()}
            with replacing(self._file) as temporary:
                save_file(own, temporary)
        weights = load_file(self._file)
        if weights.keys() != trained.keys():
            raise CheckpointError(f"{self._file} holds the weights of another model")
        parameters = dict(self._copy.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                parameters[name].copy_(weight)
        self._taken = True


@dataclass(frozen=True, slots=True)
class _ServerScores:
    """Scores with a vLLM server, once it is connected."""

    client: VLLMChatClient

    async def logprobs(self, items: Sequence[SAWItem]) -> scoring.Scores:
        return await scoring.ClientScores(self.client, self.client.model or "").logprobs(items)


def _router(teachers: Sequence[TeacherSection]) -> Any:
    def route(item: SAWItem) -> str:
        task = item.meta.get("task_key")
        for index, teacher in enumerate(teachers):
            if task is not None and any(fnmatchcase(str(task), t) for t in teacher.tasks):
                return teacher_name(index)
        return str(item.meta.get(TEACHER, task))

    return route


def check_scoring(config: RunConfig, algorithm: RLAlgorithm, envs: Sequence[str]) -> None:
    """Raises if the algorithm needs a model that the run does not name, or does not use one."""
    losses = list(parts_of(algorithm.loss))
    name, built_in = config.algorithm.name, config.algorithm.name in ALGORITHMS.names()
    with_kl = any(isinstance(loss, TokenKLLoss) for loss in losses)
    taught = any(isinstance(loss, OnPolicyDistillationLoss) for loss in losses)
    charged = any(isinstance(step, KLInReward) for step in steps_of(algorithm.preprocess))
    if (with_kl or charged) and config.reference is None:
        raise ConfigError(
            f"algorithm {name!r} with a KL term needs a reference: add [reference] with "
            'model = "start" or another model, or set algorithm.kwargs.kl_coeff=0'
        )
    if taught and not config.teacher:
        raise ConfigError(
            f"algorithm {name!r} needs a teacher: name its model, or its server, in a [[teacher]] "
            "table"
        )
    if config.reference is not None:
        check_other(config.reference, "reference")
        if built_in and not with_kl and not charged and "kl_coeff" not in config.algorithm.kwargs:
            raise ConfigError(
                "nothing uses the [reference]: set algorithm.kwargs.kl_coeff above 0 for a KL in "
                "the loss (to 0 to measure it only), or reference.kl_in_reward for one in the "
                "reward"
            )
    for number, teacher in enumerate(config.teacher, 1):
        check_other(teacher, f"teacher {number}")
        if teacher.model == "start":
            raise ConfigError(
                f'teacher {number}: model = "start" is the policy itself, which teaches nothing'
            )
    if built_in and config.teacher and not taught:
        raise ConfigError(
            f"algorithm {name!r} does not use a [[teacher]]: set algorithm.name='opd', or leave it "
            "out"
        )
    teachers_by_env(config.teacher, envs)
    _check_servers(config)


def _check_servers(config: RunConfig) -> None:
    sampling = config.inference.sampling
    tables = [config.reference, *config.teacher]
    if not any(table is not None and table.server is not None for table in tables):
        return
    plain = sampling.top_p == 1 and not sampling.top_k and not sampling.min_p
    if sampling.temperature != 1 or not plain:
        raise ConfigError(
            "a reference or teacher behind a server scores at temperature 1 and without top_p, "
            "top_k and min_p: sample like that, or name a `model` in place of the `server`"
        )
