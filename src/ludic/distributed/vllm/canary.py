"""A prompt that trainer and server both score, and how far apart their scores may be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ludic.distributed.interfaces import WeightsOfModel
from ludic.inference.local.copies import shared_copy
from ludic.plumbing.cuda_streams import aside, wait_for
from ludic.plumbing.model_parts import base_causal_lm, vocabulary_size

Scores = tuple[tuple[int, ...], list[float]]
"""A prompt, and the log-prob of each of its tokens after the first."""


@dataclass(frozen=True, slots=True)
class MismatchBudget:
    """How far two computations of the same log-probs may lie apart: on average, and at most."""

    mean: float
    max: float

    @staticmethod
    def for_dtype(dtype: torch.dtype | str) -> MismatchBudget:
        """float32: rounding alone. Half types: what two right implementations were seen to differ
        by, with room; their worst tokens are unlikely ones."""
        name = str(dtype).split(".")[-1]
        return MismatchBudget(2e-4, 1e-3) if name == "float32" else MismatchBudget(0.15, 2.5)

    def allows(self, mean: float, worst: float) -> bool:
        """Whether both lie within it; NaN never does."""
        return mean <= self.mean and worst <= self.max

    def complaint(self, mean: float, worst: float) -> str | None:
        """How a difference breaks it; None where it does not."""
        if self.allows(mean, worst):
            return None
        return (
            f"differ by {mean:.2g} on average and {worst:.2g} at most (budget {self.mean:g} and "
            f"{self.max:g})"
        )


class Canary:
    """The prompt and the budget of a publisher's canary; without a `prompt` one is made of the
    first model, without a `budget` it goes by each model's type."""

    def __init__(
        self, enabled: bool, prompt: Sequence[int] | None, budget: MismatchBudget | None
    ) -> None:
        self.enabled = enabled
        self._prompt = None if prompt is None else tuple(prompt)
        self._budget = budget
        self._taken: dict[int, asyncio.Task[Scores]] = {}
        self._own: asyncio.Task[Scores] | None = None
        self._beside: tuple[nn.Module, nn.Module] | None = None
        """A model, and other module objects around its parameters."""

    def model_of(self, weights: Any) -> nn.Module | None:
        """The model behind `weights`, where it is to score the canary and this rank can run it."""
        model = weights.model if isinstance(weights, WeightsOfModel) else None
        return None if not self.enabled or model is None or is_sharded(model) else model

    async def take(self, model: nn.Module, version: int) -> None:
        """Scores the prompt now, for a publish of `version` that may have begun already; when this
        returns, the weights may change. Other module objects around the same parameters do it, so
        that the model keeps its mode, and the trainer may compute with it meanwhile; on a GPU, in
        another stream than this. They are made the first time, when nobody computes: later, its
        adapter may be switched off for a moment."""

        def score() -> Scores:
            parameters = list(model.parameters())
            wait_for(parameters)
            if self._beside is None or self._beside[0] is not model:
                self._beside = model, shared_copy(base_causal_lm(model), lambda config: None).eval()
            with aside(parameters):
                return self._score(self._beside[1])

        self._taken = {v: s for v, s in self._taken.items() if v >= version - 1}
        self._taken[version] = scoring = asyncio.create_task(asyncio.to_thread(score))
        await asyncio.shield(scoring)

    def at(self, version: int) -> Canary:
        """The canary of one publish: with the scores that are taken for it, if any are."""
        if version not in self._taken:
            return self
        fixed = copy(self)
        fixed._own = self._taken[version]
        return fixed

    @property
    def is_scored(self) -> bool:
        """Whether it is that of one publish, with the scores that are taken for it."""
        return self._own is not None

    def prompt(self, model: nn.Module) -> tuple[int, ...]:
        """The prompt. Making it takes a while, so call this in a thread."""
        if self._prompt is None:
            self._prompt = canary_tokens(model)
        return self._prompt

    async def own_scores(self, model: nn.Module) -> Scores:
        """The prompt, and the trainer's scores of it."""
        if self._own is not None:
            return await asyncio.shield(self._own)
        return await asyncio.to_thread(self._score, model)

    def _score(self, model: nn.Module) -> Scores:
        prompt = self.prompt(model)
        return prompt, prompt_logprobs(model, prompt)

    def budget(self, model: nn.Module) -> MismatchBudget:
        return self._budget or MismatchBudget.for_dtype(next(model.parameters()).dtype)


@torch.no_grad()
def canary_tokens(model: nn.Module, length: int = 24) -> tuple[int, ...]:
    """A prompt in the model's own words, sampled with a fixed seed.

    Ids without meaning would do for random weights. A trained model is so surprised by them that
    two right computations in bfloat16 lie far apart, farther than a wrong weight would move them.
    """
    device = next(model.parameters()).device
    chances = torch.Generator().manual_seed(0)
    ids = [7 % vocabulary_size(base_causal_lm(model))]
    for _ in range(length - 1):
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits
        probabilities = logits[0, -1].double().softmax(-1).cpu()
        ids.append(int(torch.multinomial(probabilities, 1, generator=chances)))
    return tuple(ids)


@torch.no_grad()
def prompt_logprobs(model: nn.Module, tokens: Sequence[int]) -> list[float]:
    """The log-prob of each token after the first under `model`, at temperature 1, in float32."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(tokens)], device=device)
    was_training = model.training
    if was_training:
        model.eval()
    try:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    finally:
        if was_training:
            model.train()
    scores = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return [float(score) for score in scores.tolist()]  # one wait for the device


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank alone cannot run it."""
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def differences(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean and largest absolute difference."""
    gaps = (torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs)).abs()
    return float(gaps.mean()), float(gaps.max())
